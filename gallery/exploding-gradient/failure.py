"""One batch in wrong units, and Adam remembers it for a thousand steps.

## What people see
One high loss in the log, if that step is logged at all; afterwards the run is strangely slow.

## What really happens
One example's feature comes in other units, ten thousand times too large, and so is the gradient. Adam's second moment keeps its
square: until it has faded, every update is hundreds of times too small.

## The cure
Check units where the data is read, and leave such batches out.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional

import ghoststep

HARM = "mean loss of the last ten steps"
HARMLESS = 0.5
V, D = 32, 24
RUNS: list[tempfile.TemporaryDirectory[str]] = []
"""Kept until the process ends, and removed then."""
HARMS: dict[str, float] = {}


class Model(nn.Module):
    """Tokens and one number for each, read by a recurrence without normalisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.number = nn.Embedding(V, D), nn.Linear(1, D)
        self.mix, self.head = nn.Linear(D, D), nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.tokens(input_ids) + self.number(numbers)))[:, :-1]


def train(unit: float) -> str:
    """120 steps, one batch with this unit; the folder of their record."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    RUNS.append(tempfile.TemporaryDirectory())
    run, losses = f"{RUNS[-1].name}/run", []
    with ghoststep.watch(model, optimizer, run_dir=run):
        for step in range(120):
            chance = torch.Generator().manual_seed(step)
            ids = (torch.randint(0, V, (8, 1), generator=chance) + torch.arange(12)) % V
            numbers = torch.rand(8, 12, 1, generator=chance) * (unit if step == 40 else 1.0)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(ids, numbers).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    HARMS[run] = sum(losses[-10:]) / 10
    return run


def broken() -> str:
    """Micrometres among millimetres, as it were."""
    return train(1e4)


def cured() -> str:
    """One unit."""
    return train(1.0)


def harm(run: str) -> float:
    """As it was measured in the loop."""
    return HARMS[run]
