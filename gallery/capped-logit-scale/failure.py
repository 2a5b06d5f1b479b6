"""Cosines without a temperature: no embedding can make this loss small.

## What people see
The loss falls a little and then sits at two thirds of ln(batch size), whatever is changed.

## What really happens
Cosines lie between -1 and 1. Without a scale the softmax over 16 of them cannot be sharp: pairs that are already together
keep pushing all others away.

## The cure
Divide by a temperature of 0.01 to 0.1, or learn the logarithm of a scale that starts at ln(1 / 0.07).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "nats of loss with perfect vectors"
HARMLESS = 0.3
V, D, B = 200, 32, 16


class Pairs(nn.Module):
    """Questions and answers to vectors of length 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.mix = nn.Embedding(V, D), nn.Linear(D, D)

    def forward(self, question_ids: torch.Tensor, answer_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = (self.mix(self.tokens(ids).mean(dim=1)) for ids in (question_ids, answer_ids))
        return functional.normalize(one, dim=-1), functional.normalize(other, dim=-1)


def loss_with(scale: float) -> Any:
    """Find the answer among the batch."""

    def loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        questions, answers = model(**batch)
        return functional.cross_entropy(scale * questions @ answers.T, torch.arange(len(questions)))

    return loss_fn


def make_batch() -> dict[str, torch.Tensor]:
    """Sixteen different pairs."""
    ids = torch.randperm(V - 2)[: B * 10].view(B, 10) + 2
    return {"question_ids": ids[:, :5], "answer_ids": ids[:, 5:]}


def broken() -> dict[str, Any]:
    """Bare cosines."""
    return {"model": Pairs(), "batch": make_batch(), "loss_fn": loss_with(1.0), "intent": "contrastive"}


def cured() -> dict[str, Any]:
    """A temperature of 0.05."""
    return {"model": Pairs(), "batch": make_batch(), "loss_fn": loss_with(20.0), "intent": "contrastive"}


def harm(setup: dict[str, Any]) -> float:
    """The loss with perfect vectors: those of a text and its answer equal, all others at right angles."""
    vectors = torch.eye(B, D)
    return float(setup["loss_fn"](lambda **_: (vectors, vectors), setup["batch"]))
