"""An LSTM that reads across the batch: each text is continued from another one.

## What people see
The loss depends on the batch size and on the order of the texts. With batch size 1 the model learns nothing at all.

## What really happens
`nn.LSTM` takes [time, batch, dims] unless told otherwise. Fed [batch, time, dims], it walks from example to example: the
state of one text flows into the next text.

## The cure
`nn.LSTM(..., batch_first=True)`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "largest change of a logit of one text when another text of the batch is replaced"
HARMLESS = 1e-6
V, D = 24, 32


class Recurrent(nn.Module):
    """Two layers: one that reads along the text, and one as given."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.lower, self.upper = nn.LSTM(D, D, batch_first=True), nn.LSTM(D, D, batch_first=batch_first)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x, _ = self.lower(self.tokens(input_ids))
        x, _ = self.upper(x)
        logits = self.head(x)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make(*, batch_first: bool) -> dict[str, Any]:
    """The setup."""
    ids = torch.randint(2, V, (4, 12), generator=torch.Generator().manual_seed(0))
    return {"model": Recurrent(batch_first=batch_first), "batch": {"input_ids": ids, "labels": ids.clone()}}


def broken() -> dict[str, Any]:
    """The default."""
    return make(batch_first=False)


def cured() -> dict[str, Any]:
    """Told that the batch comes first."""
    return make(batch_first=True)


def harm(setup: dict[str, Any]) -> float:
    """Replace example 0 and look at example 1."""
    model, batch = setup["model"], setup["batch"]
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0] = 2 + (other["input_ids"][0] + 5) % (V - 2)
    with torch.no_grad():
        return float((model(**batch).logits - model(**other).logits)[1].abs().max())
