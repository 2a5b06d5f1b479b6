"""The table was resized and the config was not: a tolerant loader throws the table away.

## What people see
The run starts at the loss of an untrained model. One line among many says that sizes did not match.

## What really happens
`config.json` still names the old `vocab_size`. `from_pretrained(..., ignore_mismatched_sizes=True)`, copied from somewhere,
makes a new random table.

## The cure
Set `vocab_size` to the table's rows.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "share of the stored table rows that are lost by loading"
HARMLESS = 0


def tiny(rows: int) -> LlamaForCausalLM:
    """A decoder with this many table rows."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def words(num: int) -> Tokenizer:
    """A tokenizer of whole words: <pad>, <s>, </s>, w3, w4, ..."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, num)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return tokenizer


def saved(model: LlamaForCausalLM, tokenizer: Tokenizer) -> Path:
    """A checkpoint folder, removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="ghoststep-gallery-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make(declared: int) -> str:
    """70 tokens, 72 table rows, and this many in the config."""
    folder = saved(tiny(72), words(70))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": declared}))
    return str(folder)


def broken() -> str:
    """The size before the tokens were added."""
    return make(64)


def cured() -> str:
    """The table's size."""
    return make(72)


def harm(setup: str) -> float:
    """Load as tolerantly as tutorials do."""
    loaded = LlamaForCausalLM.from_pretrained(setup, ignore_mismatched_sizes=True).get_input_embeddings().weight.detach()
    stored = tiny(72).get_input_embeddings().weight.detach()
    kept = sum(bool((stored[i] == loaded[i]).all()) for i in range(min(len(stored), len(loaded))))
    return 1 - kept / len(stored)
