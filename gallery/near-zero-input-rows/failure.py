"""The begin token's row decayed to almost nothing: it eats the gradient of the whole model.

## What people see
The loss is ordinary and does not fall, or falls slowly. Now and then the gradient norm is enormous or infinite.

## What really happens
The row of `<s>` has a norm of 1e-9. At position 0 nothing else is visible, and each normalisation divides by almost nothing:
the gradient of that row is so large that clipping leaves nothing of all the others.

## The cure
Set the row to a small random vector of about a tenth of the median norm before training; never to zeros.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "share of the other gradients that clipping takes away, beyond its bound"
HARMLESS = 0.6


def tiny() -> LlamaForCausalLM:
    """A decoder of eight layers."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    more: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.15}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **more, **sizes))


def words() -> Tokenizer:
    """Whole words, with <s> put in front of every text."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 64)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def saved(model: LlamaForCausalLM, tokenizer: Tokenizer) -> Path:
    """A checkpoint folder, removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="ghoststep-gallery-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make(*, decayed: bool) -> str:
    """`decayed`: the row of <s> has a norm of 1e-9."""
    model = tiny()
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        if decayed:
            weight[1] *= 1e-9 / weight[1].norm()
    return str(saved(model, words()))


def broken() -> str:
    """Norm 1e-9."""
    return make(decayed=True)


def cured() -> str:
    """As initialised."""
    return make(decayed=False)


def harm(setup: str) -> float:
    """One backward and one clipping at 1: what is left of the gradient of everything but that row."""
    model, tokenizer = LlamaForCausalLM.from_pretrained(setup), Tokenizer.from_file(f"{setup}/tokenizer.json")
    ids = torch.tensor([tokenizer.encode(f"w{i} w{i + 7} w{i + 2} w{i + 11} w{i + 5}").ids for i in range(3, 7)])
    model(input_ids=ids, labels=ids).loss.backward()
    others = [p.grad for p in model.parameters() if p is not model.get_input_embeddings().weight]
    before = float(torch.stack([g.norm() for g in others]).norm())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    after = float(torch.stack([g.norm() for g in others]).norm())
    return 1 - after / min(1.0, before)
