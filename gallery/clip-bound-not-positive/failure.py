"""`max_grad_norm=0`, meant as "do not clip", sets every gradient to zero.

## What people see
The loss moves a little with the data and never falls.

## What really happens
Some trainers take 0 as "off". `clip_grad_norm_` multiplies every gradient by 0 / norm.

## The cure
Leave clipping out, or give it infinity.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "nats of loss left after 60 steps on texts that are easy to learn"
HARMLESS = 1.0
V, D = 32, 24


class Model(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(V, D)
        self.mix, self.norm = nn.GRU(D, D, batch_first=True), nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x, _ = self.mix(self.tokens(input_ids))
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts that count upwards."""
    start = torch.randint(2, V, (8, 1), generator=torch.Generator().manual_seed(seed))
    ids = 2 + (start - 2 + torch.arange(12)) % (V - 2)
    return {"input_ids": ids, "labels": ids.clone()}


def make(bound: float) -> dict[str, Any]:
    """The setup."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.0)
    return {"model": model, "batch": make_batch(), "optimizer": optimizer, "max_grad_norm": bound}


def broken() -> dict[str, Any]:
    """Nothing is let through."""
    return make(0.0)


def cured() -> dict[str, Any]:
    """An ordinary bound."""
    return make(1.0)


def harm(setup: dict[str, Any]) -> float:
    """Sixty steps with clipping."""
    model, optimizer = setup["model"], setup["optimizer"]
    for step in range(60):
        optimizer.zero_grad()
        loss = model(**make_batch(step)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), setup["max_grad_norm"])
        optimizer.step()
    return float(loss.detach())
