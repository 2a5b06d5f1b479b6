"""Saving keeps the adapters by name, and forgets the trained embedding.

## What people see
The last evaluation of the run is good. The loaded model is not.

## What really happens
The save function filters the state dict by "mix". The embedding and the head were trained too, and come back as they were
before training.

## The cure
Save what has `requires_grad`, and compare the loss after loading with the one before saving.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "nats by which the loss is higher after saving and loading"
HARMLESS = 1e-4
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


def make(kept: str) -> dict[str, Any]:
    """`kept`: what saved names begin with."""
    model = Model()

    def save(model: Model, folder: str) -> None:
        torch.save({k: v for k, v in model.state_dict().items() if k.startswith(kept)}, Path(folder) / "weights.pt")

    def load(folder: str) -> Model:
        fresh = Model()
        fresh.load_state_dict(torch.load(Path(folder) / "weights.pt", weights_only=True), strict=False)
        return fresh

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "batch": make_batch(), "optimizer": optimizer, "save": save, "load": load}


def broken() -> dict[str, Any]:
    """One part of the model."""
    return make("mix")


def cured() -> dict[str, Any]:
    """All of it."""
    return make("")


def harm(setup: dict[str, Any]) -> float:
    """Train, save, load, compare."""
    import tempfile

    model, optimizer = setup["model"], setup["optimizer"]
    for step in range(40):
        optimizer.zero_grad()
        model(**make_batch(step)).loss.backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        setup["save"](model, folder)
        return float(setup["load"](folder)(**setup["batch"]).loss - model(**setup["batch"]).loss)
