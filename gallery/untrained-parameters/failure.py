"""The head is replaced after the optimizer was made, and the loss falls all the same.

## What people see
A classifier whose loss falls slowly to a mediocre value. More steps and other learning rates help a little.

## What really happens
The optimizer holds the head that was thrown away. The new one gets gradients that nobody applies: it stays as it was drawn, and the
layers below learn to please a random head. In a setup GS601 says so before training; in a run nothing looks wrong, step by step.

## The cure
Make the optimizer after the last change of the model.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional

import ghoststep

HARM = "mean loss of the last 20 steps"
HARMLESS = 0.6
V, D, CLASSES = 32, 16, 8
RUNS: list[tempfile.TemporaryDirectory[str]] = []
"""Kept until the process ends, and removed then."""
HARMS: dict[str, float] = {}


class Model(nn.Module):
    """Counts tokens into a bag and names their most frequent class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(V, D)
        self.mix, self.head = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.tokens(input_ids).mean(dim=1))))


def make_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts whose tokens are mostly of one class, and that class."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (16,), generator=chance)
    own = labels[:, None] + CLASSES * torch.randint(0, V // CLASSES, (16, 8), generator=chance)
    noise = torch.randint(0, V, (16, 8), generator=chance)
    return torch.where(torch.rand(16, 8, generator=chance) < 0.4, noise, own), labels


def train(*, is_late: bool) -> str:
    """200 steps; the folder of their record. is_late: the optimizer is made after the head."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.head = nn.Linear(D, CLASSES)
    if is_late:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    RUNS.append(tempfile.TemporaryDirectory())
    run, losses = f"{RUNS[-1].name}/run", []
    with ghoststep.watch(model, optimizer, run_dir=run):
        for step in range(200):
            ids, labels = make_batch(step)
            model.zero_grad()
            loss = functional.cross_entropy(model(ids), labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    HARMS[run] = sum(losses[-20:]) / 20
    return run


def broken() -> str:
    """The optimizer was made for the old head."""
    return train(is_late=False)


def cured() -> str:
    """It is made for the new one."""
    return train(is_late=True)


def harm(run: str) -> float:
    """As it was measured in the loop."""
    return HARMS[run]
