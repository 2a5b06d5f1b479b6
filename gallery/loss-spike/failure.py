"""The learning rate jumps for a few steps, and the model forgets what it had learned.

## What people see
The mean loss of the epoch is somewhat higher than that of the last one.

## What really happens
A schedule that was resumed from another total length starts again at its peak, hundreds of times the rate at which the run was.
A few steps throw the weights out of place; the loss is far above all that came before, and so is the gradient.

## The cure
Go back to the checkpoint before the jump; save and load the scheduler with the optimizer.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional

import ghoststep

HARM = "mean loss of the last twenty steps over that of the twenty before the jump"
HARMLESS = 1.2
V, D = 32, 24
RUNS: list[tempfile.TemporaryDirectory[str]] = []
"""Kept until the process ends, and removed then."""
HARMS: dict[str, float] = {}


class Model(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(V, D)
        self.mix, self.head = nn.GRU(D, D, batch_first=True), nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, _ = self.mix(self.tokens(input_ids))
        return self.head(x)[:, :-1]


def make_batch(seed: int) -> torch.Tensor:
    """Texts that count upwards, every third token by chance."""
    chance = torch.Generator().manual_seed(seed)
    ids = (torch.randint(0, V, (8, 1), generator=chance) + torch.arange(12)) % V
    ids[:, ::3] = torch.randint(0, V, (8, 4), generator=chance)
    return ids


def train(peak: float) -> str:
    """160 steps, five of them at the peak; the folder of their record."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    RUNS.append(tempfile.TemporaryDirectory())
    run, losses = f"{RUNS[-1].name}/run", []
    with ghoststep.watch(model, optimizer, run_dir=run):
        for step in range(160):
            optimizer.param_groups[0]["lr"] = peak if 120 <= step < 125 else 3e-3
            ids = make_batch(step)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(ids).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    HARMS[run] = sum(losses[-20:]) / sum(losses[100:120])
    return run


def broken() -> str:
    """The schedule starts again."""
    return train(3.0)


def cured() -> str:
    """It goes on."""
    return train(3e-3)


def harm(run: str) -> float:
    """As it was measured in the loop."""
    return HARMS[run]
