"""Padding is trained on: most of the loss is about predicting PAD after PAD.

## What people see
The loss looks good from the first hundred steps on, the better the shorter the texts.

## What really happens
`labels = input_ids.clone()` holds PAD ids, and nothing sets them to -100.

## The cure
`labels[attention_mask == 0] = -100`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "nats by which the logged loss is lower than the loss over real tokens"
HARMLESS = 0.05
V = 48


def tiny() -> LlamaForCausalLM:
    """A two-layer decoder with rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def make_batch(seed: int, *, ignored: bool) -> dict[str, torch.Tensor]:
    """Random texts of 4 to 12 tokens. `ignored`: padding is left out of the loss."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, V, (8, 12), generator=random)
    lengths = torch.randint(4, 13, (8, 1), generator=random)
    attended = (torch.arange(12)[None] < lengths).long()
    ids = ids * attended
    labels = ids.masked_fill(attended == 0, -100) if ignored else ids.clone()
    return {"input_ids": ids, "attention_mask": attended, "labels": labels}


def broken() -> dict[str, Any]:
    """PAD is a target."""
    return {"model": tiny(), "batch": make_batch(0, ignored=False), "pad_token_id": 0}


def cured() -> dict[str, Any]:
    """PAD is left out."""
    return {"model": tiny(), "batch": make_batch(0, ignored=True), "pad_token_id": 0}


def harm(setup: dict[str, Any]) -> float:
    """Train, then compare what is logged with the loss over real tokens."""
    model = setup["model"]
    ignored = bool((setup["batch"]["labels"] == -100).any())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        optimizer.zero_grad()
        model(**make_batch(step, ignored=ignored)).loss.backward()
        optimizer.step()
    with torch.no_grad():
        logged = model(**make_batch(10_000, ignored=ignored)).loss
        return float(model(**make_batch(10_000, ignored=True)).loss - logged)
