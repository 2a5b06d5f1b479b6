"""One batch without a single answer, and the model is dead while the log shows a loss.

## What people see
A loss that looks ordinary, or 0.0: NaN is left out of the mean that is logged.

## What really happens
No position of one batch is an answer (all were cut off before it). The masked mean over nothing is 0 / 0 = NaN, so are its
gradients, and the optimizer writes them into every weight.

## The cure
Divide the sum by the number of supervised tokens, at least 1; or leave such batches out.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional

import ghoststep

HARM = "share of the weights that are NaN at the end"
HARMLESS = 0.0
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


def train(*, is_safe: bool) -> str:
    """Forty steps, in the twentieth nothing is supervised; the folder of their record."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    RUNS.append(tempfile.TemporaryDirectory())
    run = f"{RUNS[-1].name}/run"
    with ghoststep.watch(model, optimizer, run_dir=run):
        for step in range(40):
            ids = make_batch(step)
            is_answer = torch.full((88,), step != 19)
            optimizer.zero_grad()
            losses = functional.cross_entropy(model(ids).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            count = is_answer.sum()
            ((losses * is_answer).sum() / (count.clamp(min=1) if is_safe else count)).backward()
            optimizer.step()
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    HARMS[run] = float(values.isnan().double().mean())
    return run


def broken() -> str:
    """The mean over nothing."""
    return train(is_safe=False)


def cured() -> str:
    """The mean over at least one."""
    return train(is_safe=True)


def harm(run: str) -> float:
    """As it was measured in the loop."""
    return HARMS[run]
