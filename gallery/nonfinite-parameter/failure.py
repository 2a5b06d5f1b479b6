"""A bias for the second language was allocated and never initialised: NaN waits in it.

## What people see
Some hundred ordinary steps, then one batch, and the loss is NaN for good. The batch looks like any other.

## What really happens
`torch.empty` leaves whatever the memory held. Batches of the first language never touch the bias; the first batch of the second one
reads NaN, and one step later so is every weight that it reaches.

## The cure
Initialise every parameter; look once before training: `[n for n, p in model.named_parameters() if not p.isfinite().all()]`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "share of the weights that are NaN after ten steps, the sixth on the second language"
HARMLESS = 0
V, D = 32, 24


class Model(nn.Module):
    """A recurrent language model with a bias for each of two languages."""

    def __init__(self, *, initialised: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.mix = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, V, bias=False)
        self.language = nn.ParameterList([torch.zeros(D), torch.zeros(D) if initialised else torch.full((D,), torch.nan)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, second: bool = False) -> SimpleNamespace:
        x, _ = self.mix(self.tokens(input_ids))
        logits = self.head(x + self.language[int(second)])
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts that count upwards."""
    start = torch.randint(2, V, (8, 1), generator=torch.Generator().manual_seed(seed))
    ids = 2 + (start - 2 + torch.arange(12)) % (V - 2)
    return {"input_ids": ids, "labels": ids.clone()}


def make(*, initialised: bool) -> dict[str, Any]:
    """The setup."""
    model = Model(initialised=initialised)
    return {"model": model, "batch": make_batch(), "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def broken() -> dict[str, Any]:
    """NaN in a bias that the first batch does not use."""
    return make(initialised=False)


def cured() -> dict[str, Any]:
    """Zeros."""
    return make(initialised=True)


def harm(setup: dict[str, Any]) -> float:
    """Ten steps."""
    model, optimizer = setup["model"], setup["optimizer"]
    for step in range(10):
        optimizer.zero_grad()
        model(**make_batch(step), second=step == 5).loss.backward()
        optimizer.step()
    known = [p for n, p in model.named_parameters() if n != "language.1"]
    return float(sum(p.isnan().sum() for p in known)) / sum(p.numel() for p in known)
