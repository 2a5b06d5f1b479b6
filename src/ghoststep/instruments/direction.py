"""Whether positions see only the past, and whether learned positions lift the embedding: from names and config."""

from __future__ import annotations

import re

from ghoststep.evidence.checkpoint import Declared, StoredTensors
from ghoststep.instruments.config_values import text_part
from ghoststep.instruments.tensor_names import STRONG_INPUT, is_modality, layer_of, parse, unwrap

_CAUSAL_TASK = re.compile(r"(?:CausalLM|LMHeadModel|LMHead|ForConditionalGeneration|DoubleHeadsModel)$")
_MASKED_TASK = re.compile(r"(?:ForMaskedLM|MaskedLM)$")
_SIDE = re.compile(
    r"^(?P<prefix>(?:(?!encoder|decoder)[^.]+\.)*)(?P<side>(?:(?:text|speech)_)?(?:encoder|decoder)|enc|dec)\.(?P<rest>(?:[^.]+\.)*\d+\..+)$"
)
_ATTENDS = re.compile(r"att|\bq\b|\bkv?\b|query|qkv", re.IGNORECASE)
_CROSSES = re.compile(r"cross_?att|enc(?:oder)?_?(?:dec(?:oder)?_?)?att|src_att|multihead_attn", re.IGNORECASE)
_ENCODER_NAME = re.compile(r"(?:^|\.)(?:pooler\.|token_type_embeddings?\.|cls\.predictions\.|token_types\.)")


def is_causal(stored: StoredTensors, facts: Declared | None) -> tuple[bool | None, str]:
    """True for decoders, False for encoders, None where the files do not say (see `is_encoder_decoder`), with the proof in words."""
    if facts is not None:
        values = {**facts.raw, **text_part(facts.raw).values}
        gguf = values.get(f"{facts.model_type}.attention.causal")
        if isinstance(gguf, bool):
            return gguf, f"attention.causal is {gguf}".lower()
        if values.get("use_bidirectional_attention") is True or values.get("is_causal") is False:
            return False, "the config declares attention in both directions"
        if values.get("is_decoder") is True:
            return True, "is_decoder is true"
        for name in facts.architectures:
            if _MASKED_TASK.search(name):
                return False, f"architectures names {name}"
            if _CAUSAL_TASK.search(name):
                return True, f"architectures names {name}"
    sign = next((name for name in stored.tensors if _ENCODER_NAME.search(name)), None)
    if sign is not None:
        return False, f"{sign} belongs to an encoder"
    if stored.format == "gguf" and "token_embd.weight" in stored.tensors:
        return True, "a GGUF language model without attention.causal=false"
    return None, ""


def is_encoder_decoder(stored: StoredTensors, facts: Declared | None) -> tuple[bool, str]:
    """Whether a decoder attends to the output of an encoder, with the proof in words. The config's flag counts before the names.

    By names: numbered layers with attention under "encoder" and under "decoder", beside each other, the latter with an attention
    across to the former. Encoders with a decoding half (no attention across) and codecs of sound or images are none. A flag
    that is false in an inner config says nothing: it speaks of the decoder alone.
    """
    if facts is not None:
        inner = text_part(facts.raw).values.get("is_encoder_decoder")
        flag = facts.raw.get("is_encoder_decoder")
        flag = flag if isinstance(flag, bool) else inner is True or None
        if flag is not None:
            return flag, "an encoder-decoder: is_encoder_decoder is true" if flag else ""
    sides: dict[str, dict[str, str]] = {}
    for name in stored.tensors:
        match = _SIDE.match(unwrap(name[:1000]))
        if match is None or is_modality(match["prefix"]):
            continue
        is_decoder = "dec" in match["side"]
        if (_CROSSES if is_decoder else _ATTENDS).search(match["rest"]):
            sides.setdefault(match["prefix"], {}).setdefault("decoder" if is_decoder else "encoder", name)
    both = next((found for found in sides.values() if len(found) == 2), None)
    return (True, f"an encoder-decoder: {both['encoder']} and {both['decoder']}") if both else (False, "")


def position_table(stored: StoredTensors, facts: Declared | None) -> str | None:
    """The name of a learned absolute position table as wide as the embedding, outside layers and other modalities, or None."""
    named = [(t, parse(t.name)) for t in stored.tensors.values() if len(t.shape) == 2 and layer_of(t.name) is None]
    widths = {t.shape[1] for t, n in named if STRONG_INPUT.match(n.own) and n.is_plain}
    if facts is not None and facts.hidden_size is not None:
        widths.add(facts.hidden_size)
    for tensor, name in named:
        fits = tensor.shape[0] >= 8 and (not widths or tensor.shape[1] in widths)
        if name.position and fits and not name.modality and not name.own.startswith("rel"):
            return tensor.name
    return None
