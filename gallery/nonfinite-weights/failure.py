"""One row of the head holds NaN, for a token that nobody uses.

## What people see
The loss is NaN from the first step. Every layer of the model looks fine.

## What really happens
A row of the output table was divided by a norm of 0. The softmax sums over all rows, so that each loss is NaN, whatever the
text.

## The cure
Take the row from an earlier checkpoint, or re-initialise it.
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

HARM = "share of 10 texts, none with that token, whose loss is NaN"
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


def make(*, normalised: bool) -> str:
    """The table row of w63 was zero; `normalised`: somebody divided rows by their norms."""
    model = tiny(64)
    with torch.no_grad():
        model.lm_head.weight[63] = 0
        if normalised:
            model.lm_head.weight /= model.lm_head.weight.norm(dim=1, keepdim=True)
    return str(saved(model, words(64)))


def broken() -> str:
    """0 / 0."""
    return make(normalised=True)


def cured() -> str:
    """As it was."""
    return make(normalised=False)


def harm(setup: str) -> float:
    """Ten texts of other words."""
    model = LlamaForCausalLM.from_pretrained(setup)
    ids = torch.randint(3, 60, (10, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return sum(bool(model(input_ids=i[None], labels=i[None]).loss.isnan()) for i in ids) / 10
