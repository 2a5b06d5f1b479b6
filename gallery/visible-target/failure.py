"""A masked language model whose loss counts the tokens that were not masked.

## What people see
The loss is near 0 after an hour and the model is worth nothing downstream.

## What really happens
`labels = input_ids.clone()` was never set to -100 where the input still shows the token. Five of six targets are read off the
input.

## The cure
`labels[~chosen] = -100`: the loss belongs to the chosen positions only.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "nats by which the logged loss is lower than the loss at masked tokens"
HARMLESS = 0.2
V, D, MASK = 48, 32, 1


class Encoder(nn.Module):
    """A bidirectional encoder with a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(64, D)
        layer = nn.TransformerEncoderLayer(D, 4, 2 * D, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(D), enable_nested_tensor=False)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.head(self.layers(self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make_batch(seed: int, *, only_masked: bool) -> dict[str, torch.Tensor]:
    """One of six tokens is masked."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, V, (8, 24), generator=random)
    chosen = torch.rand(ids.shape, generator=random) < 1 / 6
    labels = ids.masked_fill(~chosen, -100) if only_masked else ids.clone()
    return {"input_ids": ids.masked_fill(chosen, MASK), "labels": labels}


def broken() -> dict[str, Any]:
    """Every token is a target."""
    return {"model": Encoder(), "batch": make_batch(0, only_masked=False)}


def cured() -> dict[str, Any]:
    """The masked tokens are."""
    return {"model": Encoder(), "batch": make_batch(0, only_masked=True)}


def harm(setup: dict[str, Any]) -> float:
    """Train, then compare what is logged with the loss at masked positions."""
    model = setup["model"]
    only_masked = bool((setup["batch"]["labels"] == -100).any())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        optimizer.zero_grad()
        model(**make_batch(step, only_masked=only_masked)).loss.backward()
        optimizer.step()
    with torch.no_grad():
        logged = model(**make_batch(10_000, only_masked=only_masked)).loss
        return float(model(**make_batch(10_000, only_masked=True)).loss - logged)
