"""Gradients are clipped while they still carry the loss scale: every step is thousands of times too short.

## What people see
The loss hardly moves. The gradient norm that is logged is huge, so clipping seems to be needed.

## What really happens
`scaler.scale(loss).backward()` leaves gradients 65536 times as large. Clipping them to 1 and unscaling them in `scaler.step`
leaves a norm of 1/65536.

## The cure
`scaler.unscale_(optimizer)` before `clip_grad_norm_`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "loss of fresh texts after 60 steps, in nats"
HARMLESS = 2.0
V, D = 32, 24


class Model(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(V, D)
        self.mix, self.norm = nn.GRU(D, D, batch_first=True), nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x, _ = self.mix(self.tokens(input_ids))
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts that count upwards."""
    start = torch.randint(2, V, (8, 1), generator=torch.Generator().manual_seed(seed))
    ids = 2 + (start - 2 + torch.arange(12)) % (V - 2)
    return {"input_ids": ids, "labels": ids.clone()}


def make(*, unscales: bool) -> dict[str, Any]:
    """`unscales`: before clipping."""
    model = Model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def train_step(model: Model, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    given = {"optimizer": optimizer, "scaler": scaler, "train_step": train_step, "max_grad_norm": 1.0}
    return {"model": model, "batches": [make_batch(s) for s in range(3)], **given}


def broken() -> dict[str, Any]:
    """Clips scaled gradients."""
    return make(unscales=False)


def cured() -> dict[str, Any]:
    """Clips real ones."""
    return make(unscales=True)


def harm(setup: dict[str, Any]) -> float:
    """Train for 60 steps."""
    model = setup["model"]
    for step in range(60):
        setup["train_step"](model, setup["optimizer"], make_batch(step))
    with torch.no_grad():
        return float(model(**make_batch(10_000)).loss)
