"""bfloat16 weights at a learning rate of 1e-6: the updates are rounded away.

## What people see
The loss hardly moves. Gradients, norms and the learning rate are all as they should be.

## What really happens
A bfloat16 number has 8 significant bits. An update of 1e-6 to a weight of 0.1 is far less than half the distance to the next
number.

## The cure
Keep float32 master weights (autocast), or use stochastic rounding.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "share of the weights with a gradient that are as they were after 20 steps"
HARMLESS = 0.5
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


def make(dtype: torch.dtype) -> dict[str, Any]:
    """The setup."""
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    return {"model": model, "batch": make_batch(), "optimizer": optimizer}


def broken() -> dict[str, Any]:
    """Weights in bfloat16."""
    return make(torch.bfloat16)


def cured() -> dict[str, Any]:
    """Weights in float32."""
    return make(torch.float32)


def harm(setup: dict[str, Any]) -> float:
    """Twenty steps, then count what stood still."""
    model, optimizer = setup["model"], setup["optimizer"]
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(20):
        optimizer.zero_grad()
        model(**make_batch(step)).loss.backward()
        optimizer.step()
    pairs = [(a == b)[b.grad != 0] for a, b in zip(before, model.parameters(), strict=True) if b.grad is not None]
    return float(torch.cat(pairs).float().mean())
