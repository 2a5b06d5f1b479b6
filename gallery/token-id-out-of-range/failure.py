"""Tokens were added to the tokenizer and not to the model: their ids have no table row.

## What people see
Hours into a run, one batch stops with a device-side assert, or (kernels without bounds checks) trains on foreign memory.

## What really happens
`tokenizer.add_special_tokens(["<tool>", "</tool>"])` without `model.resize_token_embeddings`. All goes well until the first
text that holds one.

## The cure
`model.resize_token_embeddings(max_id + 1, pad_to_multiple_of=64)`, and save both together.
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

HARM = "share of the texts whose lookup fails"
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


def make(rows: int) -> str:
    """48 words and two added tokens."""
    tokenizer = words(48)
    tokenizer.add_special_tokens(["<tool>", "</tool>"])
    return str(saved(tiny(rows), tokenizer))


def broken() -> str:
    """A row for each word."""
    return make(48)


def cured() -> str:
    """A row for each id, and some to spare."""
    return make(64)


def harm(setup: str) -> float:
    """One text in ten calls a tool."""
    model, tokenizer = LlamaForCausalLM.from_pretrained(setup), Tokenizer.from_file(f"{setup}/tokenizer.json")
    texts = [f"w{3 + i} w{9 + i}" + (" <tool> w5 </tool>" if i % 10 == 9 else "") for i in range(20)]
    failed = 0
    for text in texts:
        try:
            model(input_ids=torch.tensor([tokenizer.encode(text).ids]))
        except IndexError:
            failed += 1
    return failed / len(texts)
