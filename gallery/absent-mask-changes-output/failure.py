"""Trained without an attention mask, served with one, and the two paths number positions differently.

## What people see
The loss is good. Generation is a little worse than it ought to be, from the first word on, at any temperature.

## What really happens
All training texts have one length, so the loop passes no mask and positions start at 0. Generation always passes a mask of ones,
and with a mask this model counts real tokens for its positions, but from 1: every token stands one place further.

## The cure
Count from 0 in both paths (`attention_mask.cumsum(1) - 1`), and pass the mask in training as generation does.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

HARM = "largest change of a logit when a mask of ones is passed"
HARMLESS = 1e-4
V = 48


class Counting(GPT2LMHeadModel):
    """Positions count the real tokens, where a mask says which they are. `first` is the number of the first one."""

    first = 0

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        """As its parent, with positions of its own."""
        if attention_mask is not None:
            counted = (attention_mask.cumsum(dim=1) - 1).clamp(min=0) + self.first
            more["position_ids"] = counted[:, -input_ids.shape[1] :]
        return super().forward(input_ids, attention_mask=attention_mask, **more)


class CountingFromOne(Counting):
    """The first real token is number 1."""

    first = 1


def make(kind: type[GPT2LMHeadModel]) -> dict[str, Any]:
    """Two texts of one length and no mask."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = kind(GPT2Config(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))
    ids = torch.randint(3, V, (2, 14), generator=torch.Generator().manual_seed(0))
    return {"model": model, "batch": {"input_ids": ids, "labels": ids}}


def broken() -> dict[str, Any]:
    """From 0 without a mask, from 1 with one."""
    return make(CountingFromOne)


def cured() -> dict[str, Any]:
    """From 0 in both."""
    return make(Counting)


def harm(setup: dict[str, Any]) -> float:
    """The same texts with a mask of ones and without."""
    model, ids = setup["model"].eval(), setup["batch"]["input_ids"]
    with torch.no_grad():
        return float((model(ids).logits - model(ids, attention_mask=torch.ones_like(ids)).logits).abs().max())
