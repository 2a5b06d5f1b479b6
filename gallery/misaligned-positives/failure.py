"""Pairs are flattened one after another and split as two halves: each question learns a stranger's text.

## What people see
The loss falls as it should. On held-out questions, search finds the right answer no more often than chance.

## What really happens
The batch is [pairs, 2, time]; flattened, question and answer alternate. `chunk(2)` then takes the first pairs as the questions and
the last pairs as their answers, so every positive belongs to another example.

## The cure
Take every second vector: `z[0::2]` and `z[1::2]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "share of the questions that do not find their own answer after 60 steps"
HARMLESS = 0.1
V, D, B = 200, 32, 16


class Encoder(nn.Module):
    """Texts to vectors of length 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.mix = nn.Embedding(V, D), nn.Linear(D, D)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.mix(self.tokens(ids).mean(dim=1)), dim=-1)


def loss_of(questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Find the answer among the batch."""
    return functional.cross_entropy(questions @ answers.T / 0.05, torch.arange(len(questions)))


def halves_loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The first half of the vectors against the second."""
    return loss_of(*model(batch["pair_ids"].flatten(0, 1)).chunk(2))


def alternating_loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Every second vector against the one behind it."""
    vectors = model(batch["pair_ids"].flatten(0, 1))
    return loss_of(vectors[0::2], vectors[1::2])


def make_batch() -> dict[str, torch.Tensor]:
    """Sixteen questions and their answers, [pairs, 2, time]."""
    return {"pair_ids": torch.randint(2, V, (B, 2, 6), generator=torch.Generator().manual_seed(0))}


def broken() -> dict[str, Any]:
    """Split as halves."""
    return {"model": Encoder(), "batch": make_batch(), "loss_fn": halves_loss_fn, "intent": "contrastive"}


def cured() -> dict[str, Any]:
    """Split as they stand."""
    return {"model": Encoder(), "batch": make_batch(), "loss_fn": alternating_loss_fn, "intent": "contrastive"}


def harm(setup: dict[str, Any]) -> float:
    """Train on the batch itself, then look up each of its questions."""
    model, batch = setup["model"], setup["batch"]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        setup["loss_fn"](model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        questions, answers = model(batch["pair_ids"][:, 0]), model(batch["pair_ids"][:, 1])
    return float(((questions @ answers.T).argmax(dim=1) != torch.arange(B)).float().mean())
