"""Positions that start at 0 in every call: right for whole texts, wrong for the one token behind a cache.

## What people see
The loss is as good as it should be, validation too. Generated text repeats itself or loses the thread after a few words.

## What really happens
The model numbers the tokens of each call from 0. Training sees whole texts and never notices. Generation feeds one new token a
step, with the others in the cache, and that token always stands at position 0.

## The cure
Count positions on from the length of the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

HARM = "largest change of a logit of the last token when the text before it comes from the cache"
HARMLESS = 1e-4
V = 48


class FromZero(GPT2LMHeadModel):
    """Numbers the tokens of each call from 0."""

    def forward(self, input_ids: Any = None, **more: Any) -> Any:
        """As its parent, with positions of its own."""
        more["position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return super().forward(input_ids, **more)


def make(kind: type[GPT2LMHeadModel]) -> dict[str, Any]:
    """Two texts without padding."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = kind(GPT2Config(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))
    ids = torch.randint(3, V, (2, 14), generator=torch.Generator().manual_seed(0))
    return {
        "model": model,
        "batch": {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids},
        "pad_token_id": 0,
    }


def broken() -> dict[str, Any]:
    """Positions from 0 in every call."""
    return make(FromZero)


def cured() -> dict[str, Any]:
    """Positions that go on behind the cache."""
    return make(GPT2LMHeadModel)


def harm(setup: dict[str, Any]) -> float:
    """The last token behind a cache of the others, against the whole text."""
    model, ids = setup["model"].eval(), setup["batch"]["input_ids"]
    with torch.no_grad():
        whole = model(ids).logits[:, -1]
        kept = model(ids[:, :-1], use_cache=True).past_key_values
        stepped = model(ids[:, -1:], past_key_values=kept).logits[:, -1]
    return float((whole - stepped).abs().max())
