"""`padding_idx` is the id of the line break: its row never learns.

## What people see
Whatever comes after a line break is worse than the rest.

## What really happens
There is no PAD in this tokenizer, so someone took id 1, the line break, as `padding_idx`. The embedding throws its gradient
away wherever a line ends.

## The cure
Leave `padding_idx` out, and mask padding by the attention mask and by labels.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "1 if the line break's row is as it was after 20 steps"
HARMLESS = 0
V, D, BREAK = 32, 24, 1


class Model(nn.Module):
    """A recurrent language model."""

    def __init__(self, padding_idx: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(V, D, padding_idx=padding_idx)
        self.mix, self.norm = nn.GRU(D, D, batch_first=True), nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x, _ = self.mix(self.tokens(input_ids))
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two lines that count upwards."""
    start = torch.randint(2, V, (8, 1), generator=torch.Generator().manual_seed(seed))
    ids = 2 + (start - 2 + torch.arange(12)) % (V - 2)
    ids[:, 5] = BREAK
    return {"input_ids": ids, "labels": ids.clone()}


def make(padding_idx: int | None) -> dict[str, Any]:
    """The setup."""
    model = Model(padding_idx=padding_idx)
    return {"model": model, "batch": make_batch(), "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def broken() -> dict[str, Any]:
    """The line break as padding."""
    return make(BREAK)


def cured() -> dict[str, Any]:
    """No padding row."""
    return make(None)


def harm(setup: dict[str, Any]) -> float:
    """Twenty steps, then look at the row."""
    model, optimizer = setup["model"], setup["optimizer"]
    before = model.tokens.weight[BREAK].detach().clone()
    for step in range(20):
        optimizer.zero_grad()
        model(**make_batch(step)).loss.backward()
        optimizer.step()
    return float(torch.equal(model.tokens.weight[BREAK], before))
