"""A word was written into the vocabulary file, and no text ever becomes it.

## What people see
The new word changes nothing. Its row stays as it was made.

## What really happens
`tool` got an entry in the BPE vocabulary by editing `tokenizer.json`. BPE only reaches what its merges build, and there is no
merge that ends in it.

## The cure
`tokenizer.add_tokens(["tool"])` instead of editing the vocabulary.
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

HARM = "share of its occurrences that do not become the token"
HARMLESS = 0


def tiny(rows: int) -> LlamaForCausalLM:
    """A decoder with this many table rows."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def saved(model: LlamaForCausalLM, tokenizer: Tokenizer) -> Path:
    """A checkpoint folder, removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="ghoststep-gallery-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make(*, edited: bool) -> str:
    """A tokenizer of single bytes, and one word more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    if edited:
        vocabulary["tool"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    if not edited:
        tokenizer.add_tokens(["tool"])
    return str(saved(tiny(320), tokenizer))


def broken() -> str:
    """Written into the vocabulary."""
    return make(edited=True)


def cured() -> str:
    """Added as a token."""
    return make(edited=False)


def harm(setup: str) -> float:
    """Five texts with the word."""
    tokenizer = Tokenizer.from_file(f"{setup}/tokenizer.json")
    wanted = tokenizer.token_to_id("tool")
    return sum(wanted not in tokenizer.encode(f"w{i} tool w{i + 2}").ids for i in range(3, 8)) / 5
