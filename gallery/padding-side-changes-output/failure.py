"""Left padding for a model with learned positions: every token stands at a place it never has alone.

## What people see
Batched generation and training on left-padded batches are worse than one text at a time, although the mask is right.

## What really happens
GPT-2 counts positions from the left edge, padding included. A text behind six PAD tokens starts at position 6.

## The cure
Pass `position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

HARM = "largest change of a logit of a text when it is padded on the left"
HARMLESS = 1e-4
V = 48


def tiny() -> GPT2LMHeadModel:
    """A two-layer decoder with learned positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def make_batch(*, counted: bool) -> dict[str, torch.Tensor]:
    """The second text has six PAD in front. `counted`: positions count real tokens only."""
    ids = torch.randint(3, V, (2, 14), generator=torch.Generator().manual_seed(0))
    attended = torch.ones_like(ids)
    attended[1, :6] = 0
    ids[attended == 0] = 0
    batch = {"input_ids": ids, "attention_mask": attended, "labels": ids.masked_fill(attended == 0, -100)}
    return {**batch, "position_ids": (attended.cumsum(dim=1) - 1).clamp(min=0)} if counted else batch


def make(*, counted: bool) -> dict[str, Any]:
    """The setup."""
    return {"model": tiny(), "batch": make_batch(counted=counted), "pad_token_id": 0}


def broken() -> dict[str, Any]:
    """Positions from the left edge."""
    return make(counted=False)


def cured() -> dict[str, Any]:
    """Positions of real tokens."""
    return make(counted=True)


def harm(setup: dict[str, Any]) -> float:
    """The second text in the batch against the same text alone."""
    model, batch = setup["model"].eval(), setup["batch"]
    with torch.no_grad():
        together = model(**batch).logits[1, 6:]
        alone = model(input_ids=batch["input_ids"][1:, 6:]).logits[0]
    return float((together - alone).abs().max())
