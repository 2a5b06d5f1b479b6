"""An evaluation turns gradients off and never on again; only the head is still trained.

## What people see
The loss falls for one step and then only a little. No error, because the head's part builds its own graph.

## What really happens
`torch.set_grad_enabled(False)` is a switch, not a block. The next step computes its features without a graph, and the head
runs under `enable_grad`.

## The cure
`with torch.no_grad():` around the evaluation, which ends by itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "trainable values that stand still from the second step on"
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


def make(*, block: bool) -> dict[str, Any]:
    """`block`: the evaluation turns gradients off inside a block."""
    model = Model()

    def train_step(model: Model, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        features, _ = model.mix(model.tokens(batch["input_ids"]))
        with torch.enable_grad():
            logits = model.head(model.norm(features))[:, :-1]
            loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if block:
            with torch.no_grad():
                model(**batch)
        else:
            torch.set_grad_enabled(False)
            model(**batch)
        return loss.detach()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {"model": model, "batches": [make_batch(s) for s in range(3)], "optimizer": optimizer, "train_step": train_step}


def broken() -> dict[str, Any]:
    """A switch."""
    return make(block=False)


def cured() -> dict[str, Any]:
    """A block."""
    return make(block=True)


def harm(setup: dict[str, Any]) -> float:
    """One step, then five more; gradient mode is put back at the end."""
    model, optimizer = setup["model"], setup["optimizer"]
    with torch.enable_grad():
        setup["train_step"](model, optimizer, make_batch(0))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for step in range(1, 6):
            setup["train_step"](model, optimizer, make_batch(step))
    return float(sum(p.numel() for name, p in model.named_parameters() if torch.equal(p, before[name])))
