"""Adam at its full learning rate from the first step on.

## What people see
The loss rises at the start, and comes back late or never. (A note: small models and small learning rates do without.)

## What really happens
The second moments rest on one batch, so that every value moves by the whole learning rate at once, whatever its gradient.

## The cure
Let the learning rate grow over the first steps: `LinearLR(optimizer, 0.01, total_iters=100)` before the decay.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "nats by which the loss rises above its start within ten steps"
HARMLESS = 0.3
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
    """Random tokens: the loss cannot get under ln 30."""
    ids = torch.randint(2, V, (8, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def make(warm_up: int) -> dict[str, Any]:
    """A decay over 1,000 steps behind a warm-up."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / warm_up, 1.0) * (1 - n / 1000))
    return {"model": model, "batch": make_batch(), "optimizer": optimizer, "scheduler": scheduler}


def broken() -> dict[str, Any]:
    """The first step is the largest."""
    return make(1)


def cured() -> dict[str, Any]:
    """Three hundred steps of warm-up."""
    return make(300)


def harm(setup: dict[str, Any]) -> float:
    """Ten steps of new texts."""
    model, optimizer = setup["model"], setup["optimizer"]
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        loss = model(**make_batch(step)).loss
        loss.backward()
        optimizer.step()
        setup["scheduler"].step()
        losses.append(loss.item())
    return max(losses) - losses[0]
