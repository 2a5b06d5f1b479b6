"""A forgotten parameter group: the norms and the embedding are in neither.

## What people see
Training works, somewhat worse than it should. No warning anywhere.

## What really happens
Weight decay is meant for matrices, so the code makes two groups: names with "weight" of `nn.Linear` and names with "bias".
Everything else is in none, gets gradients, and never moves.

## The cure
Make the groups by what is left: `decayed` and `not in decayed`, and count that they add up to all parameters.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "trainable values that are as they were after 20 steps"
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


def make(*, complete: bool) -> dict[str, Any]:
    """Two groups; `complete`: whatever is not decayed is in the second."""
    model = Model()
    named = dict(model.named_parameters())
    decayed = [name for name in named if name.startswith(("head", "mix.weight"))]
    rest = [name for name in named if (name not in decayed if complete else "bias" in name and "norm" not in name)]
    groups = [{"params": [named[n] for n in decayed]}, {"params": [named[n] for n in rest], "weight_decay": 0.0}]
    return {"model": model, "batch": make_batch(), "optimizer": torch.optim.AdamW(groups, lr=1e-3)}


def broken() -> dict[str, Any]:
    """By name, twice."""
    return make(complete=False)


def cured() -> dict[str, Any]:
    """By name, and the rest."""
    return make(complete=True)


def harm(setup: dict[str, Any]) -> float:
    """Twenty steps, then count what stood still."""
    model, optimizer = setup["model"], setup["optimizer"]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(20):
        optimizer.zero_grad()
        model(**make_batch(step)).loss.backward()
        optimizer.step()
    still = [p.numel() for name, p in model.named_parameters() if torch.equal(p, before[name])]
    return float(sum(still))
