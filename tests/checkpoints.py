"""Small checkpoints as real files: config.json, model.safetensors, tokenizer.json. Built, not trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WORDS = [f"word{i}" for i in range(50)]
SPECIALS = ["<pad>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{% else %}<|assistant|>{% endif %}{{ m.content }}</s>{% endfor %}"
)
GATED = (
    "backbone.layers.{i}.mixer.A_log",
    "backbone.layers.{i}.mixer.conv1d.weight",
    "backbone.layers.{i}.mixer.in_proj.weight",
)
ATTENTION = ("model.layers.{i}.self_attn.q_proj.weight", "model.layers.{i}.self_attn.k_proj.weight")


def build(
    folder: Path,
    *,
    wiring: str = "gated",
    rows: int = 64,
    dims: int = 32,
    tied: bool = False,
    input_rows: Mapping[int, float] | None = None,
    template: str | None = TEMPLATE,
    specials: Sequence[str] = SPECIALS,
    tokenizer: bool = True,
    config: Mapping[str, object] | None = None,
) -> Path:
    """`input_rows` scales a table row to this L2 norm (0 makes it exactly zero). Ids: specials first, then WORDS."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    table = rng.standard_normal((rows, dims)).astype(np.float32)
    for row, norm in (input_rows or {}).items():
        table[row] = (table[row] / np.linalg.norm(table[row].astype(np.float64)) * norm).astype(np.float32)
    gated = wiring == "gated"
    tensors = {("backbone.embeddings.weight" if gated else "model.embed_tokens.weight"): table}
    if not tied:
        tensors["lm_head.weight"] = rng.standard_normal((rows, dims)).astype(np.float32)
    for i in range(2):
        for name in GATED if gated else ATTENTION:
            tensors[name.format(i=i)] = rng.standard_normal((4, 1, 4) if "conv" in name else (dims, dims)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values: dict[str, object] = {
        "architectures": ["BuiltForCausalLM"],
        "model_type": "built",
        "vocab_size": rows,
        "hidden_size": dims,
        "num_hidden_layers": 2,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "eos_token_id": 1,
        **(config or {}),
    }
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    if tokenizer:
        write_tokenizer(folder, specials, template)
    return folder


def write_tokenizer(folder: Path, specials: Sequence[str], template: str | None) -> None:
    """A word-level tokenizer whose words text can produce, with these special tokens in front."""
    vocabulary = {token: i for i, token in enumerate([*specials, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=specials[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece(prefix="##")
    made.add_special_tokens(list(specials))
    made.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": specials[0],
        "eos_token": specials[1],
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
