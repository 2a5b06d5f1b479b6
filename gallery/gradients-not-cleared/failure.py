"""Nobody calls `zero_grad`: each step adds its gradient to all before it.

## What people see
The loss falls, overshoots and wanders. A smaller learning rate seems to help.

## What really happens
`backward` adds to `.grad`. Without `zero_grad` the optimizer steps along the sum of the whole history.

## The cure
`optimizer.zero_grad()` before each backward.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "1 - cosine between what the optimizer steps along at step 30 and the batch's own gradient"
HARMLESS = 1e-3
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


def make(*, clear: bool) -> dict[str, Any]:
    """`clear`: the step begins with zero_grad."""
    model = Model()

    def train_step(model: Model, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if clear:
            optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "batches": [make_batch(s) for s in range(3)], "optimizer": optimizer, "train_step": train_step}


def broken() -> dict[str, Any]:
    """Never."""
    return make(clear=False)


def cured() -> dict[str, Any]:
    """Each step."""
    return make(clear=True)


def harm(setup: dict[str, Any]) -> float:
    """Thirty steps; then the gradient that was used against a fresh one at the same weights."""
    model, optimizer = setup["model"], setup["optimizer"]
    for step in range(29):
        setup["train_step"](model, optimizer, make_batch(step))
    fresh = torch.cat([g.flatten() for g in torch.autograd.grad(model(**make_batch(29)).loss, list(model.parameters()))])
    setup["train_step"](model, optimizer, make_batch(29))
    used = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return float(1 - torch.cosine_similarity(used, fresh, dim=0))
