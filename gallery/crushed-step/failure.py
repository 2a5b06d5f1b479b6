"""A rare token arrives, and everything but its own table row moves a millionth of its way.

## What people see
A spike of the gradient norm now and then, finite, which "clipping took care of".

## What really happens
The token's table row decayed to 1e-12, and its gradient is 1e9. Clipping to 1 multiplies all gradients by 1e-9: the step is lost for
everything else. The row heals by it, so that each rare token does this once.

## The cure
Clip with `ghoststep.clip_grad_norm_`: rows are capped before everything is clipped. Or repair the rows before training.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import ghoststep

HARM = "share of the batches with a rare token in which the rest keeps under a thousandth of its gradient"
HARMLESS = 0.0
V, D = 60, 24
RUNS: list[tempfile.TemporaryDirectory[str]] = []
"""Kept until the process ends, and removed then."""
HARMS: dict[str, float] = {}


class Model(nn.Module):
    """A recurrent language model that normalises what the table gives it, once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(V, D)
        self.mix, self.head = nn.GRU(D, D, batch_first=True), nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for _ in range(1):
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
    """Forty steps, four of them with a rare token each; the folder of their record."""
    model = Model()
    with torch.no_grad():
        model.tokens.weight[-10:] *= 1e-12
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    RUNS.append(tempfile.TemporaryDirectory())
    run, lost = f"{RUNS[-1].name}/run", 0
    with ghoststep.watch(model, optimizer, run_dir=run):
        for step in range(40):
            token = V - 10 + step // 10 if step % 10 == 9 else None
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
