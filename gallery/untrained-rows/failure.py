"""A block of reserved tokens has one and the same row: the model cannot tell them apart.

## What people see
New markers taken from the reserved tokens are mixed up at first. (A note: the first steps of full training tell them apart.)

## What really happens
The rows were initialised as one value and never trained, since no text held them.

## The cure
Give rows that will be used values of their own: the mean of the trained rows plus noise of their spread.
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

HARM = "pairs of tokens that give the same logits"
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


def make(*, same: bool) -> str:
    """The last eight rows are reserved."""
    model = tiny(64)
    if same:
        with torch.no_grad():
            model.get_input_embeddings().weight[56:] = model.get_input_embeddings().weight.mean(dim=0)
    return str(saved(model, words(64)))


def broken() -> str:
    """One row, eight times."""
    return make(same=True)


def cured() -> str:
    """Eight rows."""
    return make(same=False)


def harm(setup: str) -> float:
    """Each reserved token in the same text."""
    model = LlamaForCausalLM.from_pretrained(setup)
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([[5, i, 7]])).logits for i in range(56, 64)]
    return float(sum(torch.equal(a, b) for k, a in enumerate(logits) for b in logits[k + 1 :]))
