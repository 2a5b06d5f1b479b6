"""The head is frozen along with a base that was unfrozen again.

## What people see
The loss falls, and ends above that of an earlier run.

## What really happens
Everything was frozen for a first phase. The second phase unfreezes the layers by a list of names, and the list lacks the
head.

## The cure
`model.requires_grad_(True)`, and print what is still frozen.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "values of the optimizer that are as they were after 20 steps"
HARMLESS = 0
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


def make(*names: str) -> dict[str, Any]:
    """Freeze all, then unfreeze what begins with one of `names`."""
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(names))
    return {"model": model, "batch": make_batch(), "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def broken() -> dict[str, Any]:
    """Without the head."""
    return make("tokens", "mix", "norm")


def cured() -> dict[str, Any]:
    """With it."""
    return make("tokens", "mix", "norm", "head")


def harm(setup: dict[str, Any]) -> float:
    """Twenty steps, then count what stood still."""
    model, optimizer = setup["model"], setup["optimizer"]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(20):
        optimizer.zero_grad()
        model(**make_batch(step)).loss.backward()
        optimizer.step()
    return float(sum(p.numel() for name, p in model.named_parameters() if torch.equal(p, before[name])))
