"""The loss is NaN on every batch, and a guard in the loop drops the steps without a word.

## What people see
The loop runs at full speed, and the averaged loss that it logs is empty or the last good one. The model does not change.

## What really happens
An entropy term multiplies a probability of 0 by its logarithm: 0 times minus infinity is NaN. The guard `if not loss.isfinite():
continue`, written for rare outliers, skips every step.

## The cure
`torch.special.entr(p)`, which knows that 0 log 0 is 0. And count what a guard drops.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "share of the steps that the guard drops"
HARMLESS = 0
V, D, TOKENS = 32, 24, 28


class Model(nn.Module):
    """A recurrent language model whose last classes are masked."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.mix = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True)
        self.head, self.safe = nn.Linear(D, V, bias=False), safe

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.head(self.mix(self.tokens(input_ids))[0])
        p = logits.masked_fill(torch.arange(V) >= TOKENS, float("-inf")).softmax(dim=-1)
        entropy = torch.special.entr(p[..., :TOKENS]) if self.safe else -p * p.log()
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss - 0.01 * entropy.sum(dim=-1).mean(), logits=logits)


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts that count upwards."""
    start = torch.randint(2, TOKENS, (8, 1), generator=torch.Generator().manual_seed(seed))
    ids = 2 + (start - 2 + torch.arange(12)) % (TOKENS - 2)
    return {"input_ids": ids, "labels": ids.clone()}


def make(*, safe: bool) -> dict[str, Any]:
    """The setup."""
    model = Model(safe=safe)
    return {"model": model, "batch": make_batch(), "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def broken() -> dict[str, Any]:
    """0 times the logarithm of 0."""
    return make(safe=False)


def cured() -> dict[str, Any]:
    """An entropy that is 0 there."""
    return make(safe=True)


def harm(setup: dict[str, Any]) -> float:
    """Ten steps of a loop with the guard."""
    model, optimizer, dropped = setup["model"], setup["optimizer"], 0
    for step in range(10):
        optimizer.zero_grad()
        loss = model(**make_batch(step)).loss
        if not loss.isfinite():
            dropped += 1
            continue
        loss.backward()
        optimizer.step()
    return dropped / 10
