"""A clip that was meant to measure only turns every weight into NaN.

## What people see
A loss of 0.0 in the log from some step on, and a gradient norm of nan. The run goes on to its end.

## What really happens
`max_grad_norm=0` makes some trainers call `clip_grad_norm_(parameters, inf)`, for the norm. One near-zero table row makes the norm
inf; inf / inf is NaN; the optimizer writes it into every weight.

## The cure
`ghoststep.clip_grad_norm_(model, math.inf)` measures and leaves the gradients as they are. Better: a finite bound.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import ghoststep

CHECK = "nan-by-infinite-clip"
HARM = "share of the weights that are NaN at the end"
HARMLESS = 0.0
V, D = 60, 24
RUNS: list[tempfile.TemporaryDirectory[str]] = []
"""Kept until the process ends, and removed then."""
HARMS: dict[str, float] = {}


class Model(nn.Module):
    """A recurrent language model that normalises what the table gives it, layer after layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(V, D)
        self.mix, self.head = nn.GRU(D, D, batch_first=True), nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for _ in range(3):
            x = functional.normalize(x, dim=-1)
        x, _ = self.mix(x)
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def make_batch(seed: int, token: int | None) -> dict[str, torch.Tensor]:
    """Texts that count upwards; the token once, in the middle."""
    start = torch.randint(0, V - 10, (8, 1), generator=torch.Generator().manual_seed(seed))
    ids = (start + torch.arange(12)) % (V - 10)
    if token is not None:
        ids[1, 6] = token
    return {"input_ids": ids, "labels": ids.clone()}


def train(clip: Any) -> str:
    """Forty steps, the tenth with the token; the folder of their record."""
    model = Model()
    with torch.no_grad():
        model.tokens.weight[-1] *= 1e-30
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    RUNS.append(tempfile.TemporaryDirectory())
    run = f"{RUNS[-1].name}/run"
    with ghoststep.watch(model, optimizer, run_dir=run):
        for step in range(40):
            optimizer.zero_grad()
            model(**make_batch(step, V - 1 if step == 9 else None)).backward()
            clip(model)
            optimizer.step()
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    HARMS[run] = float(values.isnan().double().mean())
    return run


def broken() -> str:
    """torch's."""
    return train(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))


def cured() -> str:
    """Ours."""
    return train(lambda model: ghoststep.clip_grad_norm_(model, math.inf))


def harm(run: str) -> float:
    """As it was measured in the loop."""
    return HARMS[run]
