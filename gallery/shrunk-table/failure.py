"""Resized to the number of tokens although ids have holes: the last tokens lost their rows.

## What people see
After "cleaning up" the table, chat markers fail at the first lookup, and generation never stops.

## What really happens
`resize_token_embeddings(len(tokenizer))`. The tokenizer has 48 tokens with ids up to 51, since four ids are unused: rows 48
to 51, the chat markers, were cut off.

## The cure
Take the table from before, and resize to the largest id + 1 or more.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "tokens of the tokenizer without a table row"
HARMLESS = 0


def tiny(rows: int) -> LlamaForCausalLM:
    """A decoder with this many table rows."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def with_holes() -> Tokenizer:
    """44 words, then a hole of four ids, then four markers."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 44)}
    vocabulary |= {f"<|m{i}|>": i for i in range(48, 52)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>", *(f"<|m{i}|>" for i in range(48, 52))])
    return tokenizer


def saved(model: LlamaForCausalLM, tokenizer: Tokenizer) -> Path:
    """A checkpoint folder, removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="ghoststep-gallery-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make(*, by_count: bool) -> str:
    """64 table rows, resized."""
    model, tokenizer = tiny(64), with_holes()
    model.resize_token_embeddings(tokenizer.get_vocab_size() if by_count else max(tokenizer.get_vocab().values()) + 1)
    return str(saved(model, tokenizer))


def broken() -> str:
    """By the number of tokens."""
    return make(by_count=True)


def cured() -> str:
    """By the largest id."""
    return make(by_count=False)


def harm(setup: str) -> float:
    """Count ids beyond the table."""
    rows = LlamaForCausalLM.from_pretrained(setup).get_input_embeddings().num_embeddings
    ids = Tokenizer.from_file(f"{setup}/tokenizer.json").get_vocab().values()
    return float(sum(i >= rows for i in ids))
