"""The loss that is shown is that of the first batch, whatever the model does.

## What people see
A flat loss: "the model does not learn", or "it is converged". The learning rate is tried at ten values.

## What really happens
The loop trains on the true loss, but a straight-through trick with a cached value (`loss - loss.detach() + shown`) gives it the same
number in every step. Gradients and weights move as they should.

## The cure
Show the loss of each batch.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional

import ghoststep

HARM = "difference between the loss that is shown and the true one at the end"
HARMLESS = 0.01
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


def train(*, is_cached: bool) -> str:
    """Eighty steps; the folder of their record."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    RUNS.append(tempfile.TemporaryDirectory())
    run, cached = f"{RUNS[-1].name}/run", None
    with ghoststep.watch(model, optimizer, run_dir=run):
        for step in range(80):
            ids = make_batch(step)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(ids).flatten(0, 1), ids[:, 1:].flatten())
            cached = loss.detach() if cached is None or not is_cached else cached
            shown = loss - loss.detach() + cached
            shown.backward()
            optimizer.step()
            HARMS[run] = abs(float(shown.detach()) - float(loss.detach()))
    return run


def broken() -> str:
    """The first batch's value for ever."""
    return train(is_cached=True)


def cured() -> str:
    """Each batch's own."""
    return train(is_cached=False)


def harm(run: str) -> float:
    """As it was measured in the loop."""
    return HARMS[run]
