"""torch.compile in three ways, an optimizer that never meets a module, and a second model with an optimizer of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from tests.launch.scripts.toys import Gates, batches, digest, loss_of, model

graphs: list[int] = []


def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
    """A backend that only counts the graphs it is given."""
    graphs.append(len(graph.graph.nodes))
    return graph


def train(called: Callable[[torch.Tensor], torch.Tensor], gates: Gates, bad: int) -> None:
    optimizer = torch.optim.SGD(gates.parameters(), lr=1e-2)
    for ids in batches(20, bad):
        loss_of(called(ids), ids).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(gates.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


stray = torch.nn.Parameter(torch.ones(3))
stray_optimizer = torch.optim.SGD([stray], lr=0.1)
first, second = model(), model()
backend = counting if sys.argv[1] == "counting" else sys.argv[1]
train(torch.compile(first, fullgraph=True, backend=backend), first, 12)
second.compile(fullgraph=True, backend=backend)
train(second, second, 15)
for _ in range(3):
    stray.grad = torch.ones(3)
    stray_optimizer.step()
assert graphs or sys.argv[1] != "counting"
print(digest(first), digest(second))
