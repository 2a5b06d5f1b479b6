"""A `no_grad` that was left around the lower half: it looks trainable and never trains.

## What people see
The loss falls, less than before the refactoring. Gradient norms look ordinary.

## What really happens
The lower layers run inside `torch.no_grad()`, a leftover of an experiment with a frozen base. Their parameters still say
`requires_grad`.

## The cure
Remove the `no_grad`, or freeze those parameters so that everyone can see it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "trainable values without a gradient"
HARMLESS = 0
V, D = 32, 24


class Model(nn.Module):
    """A recurrent language model."""

    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(V, D)
        self.mix, self.norm = nn.GRU(D, D, batch_first=True), nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.cut = cut

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        with torch.set_grad_enabled(not self.cut and torch.is_grad_enabled()):
            x, _ = self.mix(self.tokens(input_ids))
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts that count upwards."""
    start = torch.randint(2, V, (8, 1), generator=torch.Generator().manual_seed(seed))
    ids = 2 + (start - 2 + torch.arange(12)) % (V - 2)
    return {"input_ids": ids, "labels": ids.clone()}


def make(*, cut: bool) -> dict[str, Any]:
    """The setup."""
    model = Model(cut=cut)
    return {"model": model, "batch": make_batch(), "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def broken() -> dict[str, Any]:
    """No graph below the norm."""
    return make(cut=True)


def cured() -> dict[str, Any]:
    """A graph all the way."""
    return make(cut=False)


def harm(setup: dict[str, Any]) -> float:
    """One backward, then count what has no gradient."""
    setup["model"](**setup["batch"]).loss.backward()
    return float(sum(p.numel() for p in setup["model"].parameters() if p.requires_grad and p.grad is None))
