"""The scheduler advances with every micro-batch: warm-up and decay run four times too fast.

## What people see
The learning rate is at its end after a quarter of the run, and the loss stops falling there. (torch warns once, in the first
lines of the log.)

## What really happens
Gradients are accumulated over four micro-batches, the optimizer steps on the fourth, and `scheduler.step()` stands outside
that `if`.

## The cure
Step the scheduler right after the optimizer, inside the same `if`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "schedule steps beyond the optimizer steps, after 8 micro-batches"
HARMLESS = 0
V, D, WINDOW = 32, 24, 4


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


def make(*, inside: bool) -> dict[str, Any]:
    """`inside`: the scheduler steps with the optimizer."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 40))
    seen = [0]

    def train_step(model: Model, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        (loss / WINDOW).backward()
        seen[0] += 1
        if seen[0] % WINDOW == 0:
            optimizer.step()
            optimizer.zero_grad()
            if inside:
                scheduler.step()
        if not inside:
            scheduler.step()
        return loss.detach()

    given = {"optimizer": optimizer, "scheduler": scheduler, "train_step": train_step, "accumulation_steps": WINDOW}
    return {"model": model, "batches": [make_batch(s) for s in range(WINDOW)], **given}


def broken() -> dict[str, Any]:
    """Outside."""
    return make(inside=False)


def cured() -> dict[str, Any]:
    """Inside."""
    return make(inside=True)


def harm(setup: dict[str, Any]) -> float:
    """Eight micro-batches are two optimizer steps."""
    for step in range(8):
        setup["train_step"](setup["model"], setup["optimizer"], make_batch(step))
    return float(setup["scheduler"].last_epoch - 2)
