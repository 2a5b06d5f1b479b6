"""Every fourth batch has no label left, and the guarded mean makes it a loss of 0.

## What people see
A loss that falls well, with a zero here and there that the running mean swallows.

## What really happens
Some prompts fill the whole length, so that truncation cuts their answers off. The mean over max(1, number of labels) turns 0 / 0 into
0: every gradient of these steps is zero, their tokens are spent for nothing, and the mean loss reads better than it is.

## The cure
A length that leaves room for the answers (or leave such examples out before batches are made).
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional

import ghoststep

HARM = "how far the mean loss that is logged lies under that of the batches with labels"
HARMLESS = 0.05
V, D, PROMPT = 32, 24, 12
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


def make_batch(seed: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts that count upwards and their labels: answers only, cut off at `length`. Every fourth batch has long prompts."""
    chance = torch.Generator().manual_seed(seed)
    ids = (torch.randint(0, V, (8, 1), generator=chance) + torch.arange(PROMPT + 6)) % V
    labels = ids.clone()
    labels[:, : PROMPT if seed % 4 == 3 else PROMPT // 2] = -100
    return ids[:, :length], labels[:, 1:length]


def train(length: int) -> str:
    """160 steps; the folder of their record."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    RUNS.append(tempfile.TemporaryDirectory())
    run, losses, filled = f"{RUNS[-1].name}/run", [], []
    with ghoststep.watch(model, optimizer, run_dir=run):
        for step in range(160):
            ids, labels = make_batch(step, length)
            optimizer.zero_grad()
            total = functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            loss = total / max(1, int((labels != -100).sum()))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            filled += [losses[-1]] if (labels != -100).any() else []
    HARMS[run] = 1 - (sum(losses) / len(losses)) / (sum(filled) / len(filled))
    return run


def broken() -> str:
    """Long prompts leave no room."""
    return train(PROMPT)


def cured() -> str:
    """There is room for every answer."""
    return train(PROMPT + 6)


def harm(run: str) -> float:
    """As it was measured in the loop."""
    return HARMS[run]
