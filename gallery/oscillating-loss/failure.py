"""Easy and hard texts take turns, batch by batch, and the curve says nothing.

## What people see
A loss that swings wildly; a running mean that hides it.

## What really happens
The data is sorted or interleaved by source. Each batch holds one kind only: the gradient points the way of one source, then of the
other.

## The cure
Shuffle across sources, so that each batch is a mixture.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional

import ghoststep

HARM = "standard deviation of the loss over its mean, in the last 64 steps"
HARMLESS = 0.4
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


def make_batch(seed: int, *, is_mixed: bool) -> torch.Tensor:
    """Texts that count upwards (easy) and random ones, in turns or mixed."""
    chance = torch.Generator().manual_seed(seed)
    easy = (torch.randint(0, V, (8, 1), generator=chance) + torch.arange(12)) % V
    hard = torch.randint(0, V, (8, 12), generator=chance)
    if is_mixed:
        return torch.cat([easy[:4], hard[:4]])
    return hard if seed % 2 else easy


def train(*, is_mixed: bool) -> str:
    """256 steps; the folder of their record."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    RUNS.append(tempfile.TemporaryDirectory())
    run, losses = f"{RUNS[-1].name}/run", []
    with ghoststep.watch(model, optimizer, run_dir=run):
        for step in range(256):
            ids = make_batch(step, is_mixed=is_mixed)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(ids).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    last = torch.stack(losses[-64:])
    HARMS[run] = float(last.std() / last.mean())
    return run


def broken() -> str:
    """In turns."""
    return train(is_mixed=False)


def cured() -> str:
    """Shuffled."""
    return train(is_mixed=True)


def harm(run: str) -> float:
    """As it was measured in the loop."""
    return HARMS[run]
