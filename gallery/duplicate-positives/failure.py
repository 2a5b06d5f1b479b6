"""The same answer stands in the batch several times: it is pulled and pushed at once.

## What people see
The loss keeps a floor that grows with the batch size. Frequent answers get poor vectors.

## What really happens
In-batch negatives take every other answer as wrong. Four questions of the batch share one answer, so each pushes away the
very text it is pulled to.

## The cure
Mask answers that equal the positive, or sample batches without duplicates.
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


def loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Find the answer among the batch."""
    questions, answers = model(**batch)
    return functional.cross_entropy(questions @ answers.T / 0.05, torch.arange(len(questions)))


def masked_loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Find it among the answers that differ from it."""
    questions, answers = model(**batch)
    ids = batch["answer_ids"]
    same = (ids[:, None] == ids[None, :]).all(dim=-1) & ~torch.eye(len(ids), dtype=torch.bool)
    logits = (questions @ answers.T / 0.05).masked_fill(same, float("-inf"))
    return functional.cross_entropy(logits, torch.arange(len(questions)))


def make_batch() -> dict[str, torch.Tensor]:
    """Sixteen questions; answers 0 to 3 serve four questions each."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(2, V, (B, 10), generator=random)
    return {"question_ids": ids[:, :5], "answer_ids": ids[:, 5:][torch.arange(B) % 4]}


def broken() -> dict[str, Any]:
    """Every other answer is wrong."""
    return {"model": Pairs(), "batch": make_batch(), "loss_fn": loss_fn, "intent": "contrastive"}


def cured() -> dict[str, Any]:
    """Every different answer is."""
    return {"model": Pairs(), "batch": make_batch(), "loss_fn": masked_loss_fn, "intent": "contrastive"}


def harm(setup: dict[str, Any]) -> float:
    """The loss with perfect vectors: those of a text and its answer equal, all others at right angles."""
    vectors = torch.eye(B, D)[torch.arange(B) % 4]
    return float(setup["loss_fn"](lambda **_: (vectors, vectors), setup["batch"]))
