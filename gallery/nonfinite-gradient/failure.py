"""An entropy term over masked classes: the loss is finite, its gradient is NaN.

## What people see
The first loss is fine, the second is NaN. Or, with clipping, the loss stays what it was for ever.

## What really happens
`torch.where(p > 0, p * p.log(), 0)` hides log(0) in the value only: the branch that was not taken still has its gradient, and
0 times infinity is NaN.

## The cure
Compute on safe values first: `p.clamp(min=tiny).log()`, or `torch.special.entr(p)` with its mask before the log.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "share of the weights that are NaN after one step"
HARMLESS = 0
V, D, TOKENS = 32, 24, 28


class Model(nn.Module):
    """A recurrent language model."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(V, D)
        self.mix, self.norm = nn.GRU(D, D, batch_first=True), nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.safe = safe

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x, _ = self.mix(self.tokens(input_ids))
        logits = self.head(self.norm(x))
        p = logits.masked_fill(torch.arange(V) >= TOKENS, float("-inf")).softmax(dim=-1)
        plogp = p * p.clamp(min=1e-30).log() if self.safe else torch.where(p > 0, p * p.log(), 0.0)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss = loss + 0.01 * plogp.sum(dim=-1).mean()
        return SimpleNamespace(loss=loss, logits=logits)


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts that count upwards."""
    start = torch.randint(2, V, (8, 1), generator=torch.Generator().manual_seed(seed))
    ids = 2 + (start - 2 + torch.arange(12)) % (TOKENS - 2)
    return {"input_ids": ids, "labels": ids.clone()}


def make(*, safe: bool) -> dict[str, Any]:
    """The setup."""
    model = Model(safe=safe)
    return {"model": model, "batch": make_batch(), "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def broken() -> dict[str, Any]:
    """The logarithm of 0, hidden."""
    return make(safe=False)


def cured() -> dict[str, Any]:
    """No logarithm of 0."""
    return make(safe=True)


def harm(setup: dict[str, Any]) -> float:
    """One step."""
    model, optimizer = setup["model"], setup["optimizer"]
    for step in range(1):
        optimizer.zero_grad()
        model(**make_batch(step)).loss.backward()
        optimizer.step()
    return float(sum(p.isnan().sum() for p in model.parameters())) / sum(p.numel() for p in model.parameters())
