"""One token takes every step that meets it, for ever, and no log shows it.

## What people see
Nothing: the loss falls. In the log, which shows every hundredth step, the gradient norm is as ever.

## What really happens
The token's table row decayed to 1e-30. Its gradient is 1e28, the float32 norm overflows to inf, and `clip_grad_norm_` multiplies
every gradient by 1 / inf = 0. The row gets no gradient either, so that it stays as it is: it is locked.

## The cure
Clip with `ghoststep.clip_grad_norm_`: the row is capped, the rest keeps its gradient, and the row heals at its first occurrence.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import ghoststep

CHECK = "zeroed-step"
HARM = "share of the batches with the token whose gradient is lost"
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
    """Forty steps, four of them with the token; the folder of their record."""
    model = Model()
    with torch.no_grad():
        model.tokens.weight[-10:] *= 1e-30
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    RUNS.append(tempfile.TemporaryDirectory())
    run, lost = f"{RUNS[-1].name}/run", 0
    with ghoststep.watch(model, optimizer, run_dir=run):
        for step in range(40):
            token = V - 1 if step % 10 == 9 else None
            optimizer.zero_grad()
            model(**make_batch(step, token)).backward()
            before = model.head.weight.grad.norm()
            clip(model)
            lost += bool(model.head.weight.grad.norm() < 1e-3 * before) and token is not None
            optimizer.step()
    HARMS[run] = lost / 4
    return run


def broken() -> str:
    """torch's clip."""
    return train(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def cured() -> str:
    """The clip that cannot lose a step."""
    return train(lambda model: ghoststep.clip_grad_norm_(model, 1.0))


def harm(run: str) -> float:
    """As it was measured in the loop."""
    return HARMS[run]
