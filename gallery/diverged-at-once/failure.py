"""A learning rate made for SGD is given to AdamW, and the very first update throws every weight out of place.

## What people see
The first line of the log, after fifty steps, shows a large loss; it falls from there, as a loss should.

## What really happens
AdamW moves each weight by the learning rate, whatever the gradient is: by several times its own size. The loss of the next step is far
above that of a model that knows nothing, and what falls afterwards never comes back to it.

## The cure
A rate for AdamW (1e-4 to 3e-3), with a warm-up where the model is large.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional

import ghoststep

CHECK = "loss-spike"
HARM = "mean loss of the last twenty steps over that of the model before it trained"
HARMLESS = 0.9
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


def train(lr: float) -> str:
    """120 steps; the folder of their record."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    RUNS.append(tempfile.TemporaryDirectory())
    run, losses = f"{RUNS[-1].name}/run", []
    with ghoststep.watch(model, optimizer, run_dir=run):
        for step in range(120):
            ids = make_batch(step)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(ids).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
    HARMS[run] = sum(losses[-20:]) / 20 / losses[0]
    return run


def broken() -> str:
    """A rate for SGD."""
    return train(1.0)


def cured() -> str:
    """A rate for AdamW."""
    return train(3e-3)


def harm(run: str) -> float:
    """As it was measured in the loop."""
    return HARMS[run]
