"""`zero_grad` stands between backward and step: the optimizer sees zeros.

## What people see
The loss stays where it starts, and the weights shrink slowly by weight decay.

## What really happens
Someone moved `zero_grad` "after backward, to save memory". The gradient is gone when the optimizer comes.

## The cure
Order: `zero_grad`, `backward`, `step`.
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


def make(*, first: bool) -> dict[str, Any]:
    """`first`: zero_grad comes before backward."""
    model = Model()

    def train_step(model: Model, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if first:
            optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        if not first:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        return loss.detach()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "batches": [make_batch(s) for s in range(3)], "optimizer": optimizer, "train_step": train_step}


def broken() -> dict[str, Any]:
    """Between backward and step."""
    return make(first=False)


def cured() -> dict[str, Any]:
    """Before backward."""
    return make(first=True)


def harm(setup: dict[str, Any]) -> float:
    """Sixty steps."""
    for step in range(60):
        loss = setup["train_step"](setup["model"], setup["optimizer"], make_batch(step))
    return float(loss)
