"""The schedule belongs to another optimizer: the learning rate never moves.

## What people see
The logged learning rate warms up and decays as planned; training behaves as if it did not. (torch warns once, in the first
lines of the log.)

## What really happens
The scheduler was made for an optimizer that was thrown away when the model was wrapped. `scheduler.step()` turns the learning
rate of a ghost.

## The cure
Make the scheduler after the optimizer that steps, and log `optimizer.param_groups[0]["lr"]`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "steps out of 20 whose learning rate is not the scheduled one"
HARMLESS = 0
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


def make(*, same: bool) -> dict[str, Any]:
    """`same`: the scheduler turns the optimizer that steps."""
    model = Model()
    old = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = old if same else torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(old, lambda n: min(1.0, (n + 1) / 10))

    def train_step(model: Model, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    given = {"optimizer": optimizer, "scheduler": scheduler, "train_step": train_step}
    return {"model": model, "batches": [make_batch(s) for s in range(3)], **given}


def broken() -> dict[str, Any]:
    """The scheduler of the first optimizer."""
    return make(same=False)


def cured() -> dict[str, Any]:
    """The scheduler of the only one."""
    return make(same=True)


def harm(setup: dict[str, Any]) -> float:
    """Twenty steps: what the schedule says against what the optimizer has."""
    wrong = 0
    for step in range(20):
        wrong += setup["optimizer"].param_groups[0]["lr"] != setup["scheduler"].get_last_lr()[0]
        setup["train_step"](setup["model"], setup["optimizer"], make_batch(step))
    return float(wrong)
