"""Only the new tokens' rows are to train; weight decay eats the others.

## What people see
The new tokens are learnt. After a long run the model has got worse at everything else.

## What really happens
A hook zeroes the gradient of the old rows, and AdamW decays them all the same: `1 - lr * weight_decay` a step.

## The cure
Put the table into a group with `weight_decay=0`, or write the old rows back after each step.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "share of the old rows' norm that is lost after 100 steps"
HARMLESS = 0
V, D, FIRST_NEW = 32, 24, 28


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


def make(weight_decay: float) -> dict[str, Any]:
    """Only rows from `FIRST_NEW` on get a gradient."""
    model = Model().requires_grad_(False)
    model.tokens.weight.requires_grad_(True)
    new = (torch.arange(V) >= FIRST_NEW).float()[:, None]
    model.tokens.weight.register_hook(lambda gradient: gradient * new)
    optimizer = torch.optim.AdamW([model.tokens.weight], lr=1e-2, weight_decay=weight_decay)
    return {"model": model, "batch": make_batch(), "optimizer": optimizer}


def broken() -> dict[str, Any]:
    """The default, ten times over."""
    return make(0.1)


def cured() -> dict[str, Any]:
    """No decay."""
    return make(0.0)


def harm(setup: dict[str, Any]) -> float:
    """A hundred steps, then the norm of rows that were not to move."""
    model, optimizer = setup["model"], setup["optimizer"]
    before = model.tokens.weight[:FIRST_NEW].detach().norm()
    for step in range(100):
        optimizer.zero_grad()
        model(**make_batch(step)).loss.backward()
        optimizer.step()
    return float(1 - model.tokens.weight[:FIRST_NEW].detach().norm() / before)
