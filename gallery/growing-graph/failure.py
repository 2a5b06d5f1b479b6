"""A running mean that is not detached drags the graphs of all earlier steps along.

## What people see
Each step takes a little longer than the one before, and memory creeps up until the run dies.

## What really happens
A penalty on the running mean of a scale keeps that mean's graph: `mean = 0.9 * mean + 0.1 * scale`. The error that torch raised for
it was silenced by `retain_graph=True`, and every backward walks through all steps so far.

## The cure
`mean = 0.9 * mean.detach() + 0.1 * scale`.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional

import ghoststep

HARM = "nodes of the graph behind the loss in the last step, over the first"
HARMLESS = 1.1
V, D = 32, 24
RUNS: list[tempfile.TemporaryDirectory[str]] = []
"""Kept until the process ends, and removed then."""
HARMS: dict[str, float] = {}


class Model(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(V, D)
        self.mix, self.head = nn.GRU(D, D, batch_first=True), nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, _ = self.mix(self.tokens(input_ids))
        return self.head(x)[:, :-1]


def make_batch(seed: int) -> torch.Tensor:
    """Texts that count upwards, every third token by chance."""
    chance = torch.Generator().manual_seed(seed)
    ids = (torch.randint(0, V, (8, 1), generator=chance) + torch.arange(12)) % V
    ids[:, ::3] = torch.randint(0, V, (8, 4), generator=chance)
    return ids


def num_nodes(loss: torch.Tensor) -> int:
    """All nodes that backward will walk through."""
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [n for n, _ in node.next_functions]
    return len(seen)


def train(*, is_detached: bool) -> str:
    """Sixty steps; the folder of their record."""
    model = Model()
    model.scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    RUNS.append(tempfile.TemporaryDirectory())
    run, mean, sizes = f"{RUNS[-1].name}/run", torch.ones(()), []
    with ghoststep.watch(model, optimizer, run_dir=run):
        for step in range(60):
            ids = make_batch(step)
            optimizer.zero_grad()
            mean = 0.9 * (mean.detach() if is_detached else mean) + 0.1 * model.scale
            logits = model.scale * model(ids)
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * mean**2
            sizes.append(num_nodes(loss))
            loss.backward(retain_graph=not is_detached)
            optimizer.step()
    HARMS[run] = sizes[-1] / sizes[1]
    return run


def broken() -> str:
    """The graph of every step before."""
    return train(is_detached=False)


def cured() -> str:
    """This step's own."""
    return train(is_detached=True)


def harm(run: str) -> float:
    """As it was measured in the loop."""
    return HARMS[run]
