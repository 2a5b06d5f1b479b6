"""The loss scaler is set back to a scale that is too large after each step: it skips every one.

## What people see
The loss is flat. The scheduler advances, the progress bar too, and nothing is raised.

## What really happens
`scaler.update(2**127)` was meant as a starting value and stands in the loop. The gradients overflow, the step is skipped, and
the scale that `update` would halve is set back.

## The cure
`scaler.update()` without a value, and a starting scale of 2**16.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "share of the weights that are as they were after 10 steps"
HARMLESS = 0.5
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


def make(*, falls: bool) -> dict[str, Any]:
    """`falls`: the scaler may lower its scale."""
    model = Model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

    def train_step(model: Model, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss * batch["labels"].numel()  # the sum over tokens
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(None if falls else 2.0**127)
        return loss.detach()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = {"optimizer": optimizer, "scaler": scaler, "train_step": train_step}
    return {"model": model, "batches": [make_batch(s) for s in range(3)], **given}


def broken() -> dict[str, Any]:
    """The scale stays."""
    return make(falls=False)


def cured() -> dict[str, Any]:
    """The scale falls until gradients fit."""
    return make(falls=True)


def harm(setup: dict[str, Any]) -> float:
    """Ten steps, then count what stood still."""
    model = setup["model"]
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(10):
        setup["train_step"](model, setup["optimizer"], make_batch(step))
    same = torch.cat([(a == b).flatten() for a, b in zip(before, model.parameters(), strict=True)])
    return float(same.float().mean())
