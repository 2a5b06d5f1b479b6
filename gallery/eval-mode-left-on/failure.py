"""An evaluation before the first step left the model in evaluation mode: it trains without its dropout.

## What people see
The training loss falls faster than it used to, and the validation loss turns upwards earlier. Nothing else.

## What really happens
`model.eval()` stays until somebody calls `model.train()`, and `backward` works in either mode. Dropout passes everything through,
and normalisation layers keep their stored statistics.

## The cure
`model.train()` right before the loop, and after every evaluation.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "share of repeated training losses of one batch that are equal to the bit: no dropout draws anything"
HARMLESS = 0
V, D = 32, 24


class Model(nn.Module):
    """A recurrent language model with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.mix = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.head(self.dropout(self.mix(self.tokens(input_ids))[0]))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make(*, training: bool) -> dict[str, Any]:
    """Texts that count upwards."""
    model = Model()
    model.train(training)
    start = torch.randint(2, V, (8, 1), generator=torch.Generator().manual_seed(0))
    ids = 2 + (start - 2 + torch.arange(12)) % (V - 2)
    batch = {"input_ids": ids, "labels": ids.clone()}
    return {"model": model, "batch": batch, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def broken() -> dict[str, Any]:
    """As `model.eval()` left it."""
    return make(training=False)


def cured() -> dict[str, Any]:
    """After `model.train()`."""
    return make(training=True)


def harm(setup: dict[str, Any]) -> float:
    """The same batch eleven times."""
    losses = [float(setup["model"](**setup["batch"]).loss.detach()) for _ in range(11)]
    return sum(loss == losses[0] for loss in losses[1:]) / 10
