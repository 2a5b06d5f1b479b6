"""A gate is sharpened by a schedule until nothing comes through it, and half of the model stops learning.

## What people see
The loss goes on falling, a little slower; every norm that is logged for the whole model is as ever.

## What really happens
`sigmoid(sharpness * score)` with a sharpness that the schedule raises from 1 to 40: the gate saturates at exp(-20), and so does
every gradient of the branch behind it.

## The cure
Bound the sharpness.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional

import ghoststep

HARM = "share of the branch's gradient that is lost by the end"
HARMLESS = 0.9
V, D = 32, 24
RUNS: list[tempfile.TemporaryDirectory[str]] = []
"""Kept until the process ends, and removed then."""
HARMS: dict[str, float] = {}


class Model(nn.Module):
    """A main path and a gated branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(V, D)
        self.main, self.branch = nn.Linear(D, D), nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor, sharpness: float) -> torch.Tensor:
        x = self.tokens(input_ids)
        gate = torch.sigmoid(torch.tensor(-0.5 * sharpness))
        return self.head(x + self.main(x).tanh() + gate * self.branch(x).tanh())[:, :-1]


def train(sharpest: float) -> str:
    """120 steps, sharp from the sixtieth on; the folder of their record."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    RUNS.append(tempfile.TemporaryDirectory())
    run, norms = f"{RUNS[-1].name}/run", []
    with ghoststep.watch(model, optimizer, run_dir=run):
        for step in range(120):
            chance = torch.Generator().manual_seed(step)
            ids = (torch.randint(0, V, (8, 1), generator=chance) + torch.arange(12)) % V
            ids[:, ::3] = torch.randint(0, V, (8, 4), generator=chance)
            optimizer.zero_grad()
            logits = model(ids, sharpest if step >= 60 else 1.0)
            functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            norms.append(float(model.branch.weight.grad.norm()))
    HARMS[run] = 1 - min(1.0, norms[-1] / norms[59])
    return run


def broken() -> str:
    """Up to 40."""
    return train(40.0)


def cured() -> str:
    """Up to 2."""
    return train(2.0)


def harm(run: str) -> float:
    """As it was measured in the loop."""
    return HARMS[run]
