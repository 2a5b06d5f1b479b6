"""The optimizer still holds the old head after the weights were tied.

## What people see
Memory is larger than expected, and saved optimizer states do not load into the next run.

## What really happens
`head.weight = tokens.weight` was run after the optimizer was made. The old head lives on in the optimizer only: nothing ever
gives it a gradient.

## The cure
Tie, resize, add adapters and wrap first; make the optimizer last.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "share of the optimizer's values that no loss reaches"
HARMLESS = 0
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


def make(*, tied_first: bool) -> dict[str, Any]:
    """The same lines in two orders."""
    model = Model()
    if tied_first:
        model.head.weight = model.tokens.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.head.weight = model.tokens.weight
    return {"model": model, "batch": make_batch(), "optimizer": optimizer}


def broken() -> dict[str, Any]:
    """The optimizer first."""
    return make(tied_first=False)


def cured() -> dict[str, Any]:
    """The optimizer last."""
    return make(tied_first=True)


def harm(setup: dict[str, Any]) -> float:
    """One backward, then count what has no gradient."""
    setup["model"](**setup["batch"]).loss.backward()
    held = [p for group in setup["optimizer"].param_groups for p in group["params"]]
    return sum(p.numel() for p in held if p.grad is None) / sum(p.numel() for p in held)
