"""What a checkpoint's config files say, from whichever file there is.

Read in this order: `config.json`, `params.json` (Mistral and Meta native), the container's own metadata (GGUF), and
`adapter_config.json`. Nested configs are searched for the part with a vocabulary size. No model code is imported or run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from ghoststep.errors import CannotLook
from ghoststep.evidence.checkpoint import Declared
from ghoststep.instruments.config_values import (
    HIDDEN_KEYS,
    LAYER_KEYS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_VOCAB,
    TIE_KEYS,
    VOCAB_KEYS,
    Part,
    Reader,
    multiplier,
    table_sizes,
    text_part,
)
from ghoststep.instruments.layer_lists import layer_kinds
from ghoststep.registry import instrument
from ghoststep.subjects.checkpoint import Checkpoint

ROLES = ("bos", "eos", "pad")
_GGUF_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


@instrument
def declared(checkpoint: Checkpoint) -> Declared:
    """Read the config files. Values of a wrong type or an impossible size count as undeclared and are listed in `problems`.

    Raises `CannotLook` when there is no config at all, or when a file is not a JSON object. A config without a vocabulary size
    is fine (None). `auto_map` code is listed, never fetched or run. Cost: a few small files.
    """
    generation = checkpoint.read_json("generation_config.json")
    for file in ("config.json", "params.json"):
        config = checkpoint.read_json(file)
        if config is not None:
            return from_config(config, file=file, generation=generation)
    metadata = checkpoint.metadata()
    if isinstance(metadata.get("general.architecture"), str):
        return from_gguf(metadata)
    config = checkpoint.read_json("adapter_config.json")
    if config is not None:
        return from_config(config, file="adapter_config.json", generation=generation)
    raise CannotLook(
        f"{checkpoint.name} has no config.json, params.json, adapter_config.json or GGUF metadata; "
        "put the model's config.json beside its weights"
    )


def from_config(config: Mapping[str, object], *, file: str, generation: Mapping[str, object] | None = None) -> Declared:
    """The declared facts of one parsed config. Never raises for its content."""
    reader = Reader(file=file)
    root, text = Part(path="", values=config), text_part(config)
    order = (text,) if text.path == "" else (text, root)
    vocab = _first(reader.count(p, VOCAB_KEYS, MAX_VOCAB) for p in order)
    hidden = reader.count(text, HIDDEN_KEYS, MAX_HIDDEN)
    layers = reader.count(text, LAYER_KEYS, MAX_LAYERS)
    tie, tie_key = _tie(reader, root, text)
    scale = _first(multiplier(reader, p, hidden[0] if hidden else None) for p in order)
    kinds = layer_kinds(text.values, layers[0] if layers else None)
    roles = (*ROLES, "decoder_start")
    ids = {role: next(filter(None, (reader.ids(p, f"{role}_token_id") for p in order)), ()) for role in roles}
    later = Reader(file="generation_config.json")
    given = Part(path="", values=generation or {})
    return Declared(
        file=file,
        model_type=reader.text(root, "model_type"),
        architectures=reader.texts(root, "architectures") or reader.texts(text, "architectures"),
        vocab_size=vocab[0] if vocab else None,
        vocab_size_key=vocab[1] if vocab else None,
        table_sizes=table_sizes(config, vocab),
        hidden_size=hidden[0] if hidden else None,
        num_layers=layers[0] if layers else None,
        tie_word_embeddings=tie,
        tie_key=tie_key,
        bos_token_ids=ids["bos"],
        eos_token_ids=ids["eos"],
        pad_token_ids=ids["pad"],
        decoder_start_token_ids=ids["decoder_start"],
        generation={role: found for role in roles if (found := later.ids(given, f"{role}_token_id"))},
        embedding_multiplier=scale[0] if scale else None,
        embedding_multiplier_key=scale[1] if scale else None,
        quantization=_quantization(config, text.values),
        remote_code=_remote_code(config.get("auto_map")),
        layer_kinds=kinds[0] if kinds else (),
        raw=config,
        problems=tuple(reader.problems + later.problems),
    )


_Found = TypeVar("_Found")


def _first(found: Iterable[_Found | None]) -> _Found | None:
    return next((f for f in found if f is not None), None)


def _tie(reader: Reader, root: Part, text: Part) -> tuple[bool | None, str | None]:
    """The tie flag of the model class, as transformers 5.24 resolves it.

    A class reads the flag of its own config: the outer one for a composite model. Several composite configs forward an inner
    true when the outer says false (old saves kept the flag in the text config), others do not: outer false with inner true is
    a contradiction, and the stored tensors decide. An absent outer flag leaves the inner one.
    """
    outer = reader.flag(root, TIE_KEYS)
    inner = reader.flag(text, TIE_KEYS) if text.path else None
    if outer is None or inner is None:
        return outer or inner or (None, None)
    if inner[0] and not outer[0]:
        return None, f"{outer[1]}=false, {inner[1]}=true"
    return outer


def _quantization(config: Mapping[str, object], text: Mapping[str, object]) -> str | None:
    """The declared method in words ("gptq 4-bit"), None if none is declared. Says nothing about which tensors it touched."""
    for values in (config, text):
        for key in ("quantization_config", "quantization", "compression_config"):
            found = values.get(key)
            if isinstance(found, str):
                return found[:80]
            if not isinstance(found, dict):
                continue
            method = found.get("quant_method") or found.get("quant_algo") or found.get("format")
            bits = next((found[k] for k in ("bits", "w_bit", "weight_bits") if isinstance(found.get(k), int)), None)
            bits = bits or (4 if found.get("load_in_4bit") is True else 8 if found.get("load_in_8bit") is True else None)
            name = method[:60] if isinstance(method, str) else key
            return f"{name} {bits}-bit" if bits else name
    return None


def _remote_code(auto_map: object) -> tuple[str, ...]:
    if not isinstance(auto_map, dict):
        return ()
    values = [v for value in auto_map.values() for v in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(v[:200] for v in values[:100] if isinstance(v, str)))


def from_gguf(metadata: Mapping[str, object], *, file: str = "GGUF metadata") -> Declared:
    """The declared facts of GGUF key-values. The vocabulary size is `<arch>.vocab_size`, else the length of the token list.

    GGUF has no tie flag: a missing `output.weight` means that the loader uses the input table.
    """
    architecture = str(metadata["general.architecture"])[:80]
    own = {k[len(architecture) + 1 :]: v for k, v in metadata.items() if k.startswith(architecture + ".")}
    part = Part(path=architecture, values=own)
    reader = Reader(file=file)
    vocab = reader.count(part, ("vocab_size",), MAX_VOCAB)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if vocab is None and isinstance(tokens, Sequence) and not isinstance(tokens, str) and len(tokens):
        vocab = len(tokens), "tokenizer.ggml.tokens"
    hidden = reader.count(part, ("embedding_length",), MAX_HIDDEN)
    layers = reader.count(part, ("block_count",), MAX_LAYERS)
    scale = multiplier(reader, part, hidden[0] if hidden else None)
    tokenizer = Part(path="tokenizer.ggml", values={k[15:]: v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")})
    ids = {role: reader.ids(tokenizer, f"{key}_token_id") for role, key in _GGUF_ROLES.items()}
    eos = tuple(dict.fromkeys((*ids["eos"], *reader.ids(tokenizer, "eot_token_id"))))
    return Declared(
        file=file,
        model_type=architecture,
        vocab_size=vocab[0] if vocab else None,
        vocab_size_key=vocab[1] if vocab else None,
        hidden_size=hidden[0] if hidden else None,
        num_layers=layers[0] if layers else None,
        bos_token_ids=ids["bos"],
        eos_token_ids=eos,
        pad_token_ids=ids["pad"],
        decoder_start_token_ids=reader.ids(part, "decoder_start_token_id"),
        embedding_multiplier=scale[0] if scale else None,
        embedding_multiplier_key=scale[1] if scale else None,
        layer_kinds=_gguf_kinds(own, layers[0] if layers else None),
        raw={k: v for k, v in metadata.items() if not isinstance(v, (list, tuple)) or len(v) <= MAX_LAYERS},
        problems=tuple(reader.problems),
    )


def _gguf_kinds(own: Mapping[str, object], num_layers: int | None) -> tuple[str, ...]:
    """Per-layer key-value heads: 0 heads in a layer means that it does not attend."""
    heads = own.get("attention.head_count_kv")
    if not isinstance(heads, (list, tuple)) or num_layers is None or len(heads) != num_layers:
        return ()
    recurrent = "recurrent" if any(k.startswith(("ssm.", "wkv", "shortconv")) for k in own) else "no attention"
    return tuple("attention" if head else recurrent for head in heads)


def text_sizes(facts: Declared) -> dict[int, str]:
    """Sizes of the text config by value, with their keys: what a table's dimensions may equal besides the hidden size."""
    part = text_part(facts.raw)
    named = {k: v for k, v in part.values.items() if isinstance(v, int) and not isinstance(v, bool)}
    return {v: part.place(k) for k, v in named.items() if v >= 8 and ("emb" in k or "proj" in k) and "position" not in k}
