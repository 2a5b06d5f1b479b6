"""Three trainings after one another; what is over must not stay in memory for ever."""

from __future__ import annotations

import gc
import weakref

import torch
from tests.launch.scripts.toys import Gates, batches, digest, loss_of, model


def train(steps: int) -> tuple[weakref.ref[Gates], str]:
    gates = model(0.1)
    optimizer = torch.optim.SGD(gates.parameters(), lr=1e-3)
    for ids in batches(steps):
        loss_of(gates(ids), ids).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return weakref.ref(gates), digest(gates)


first, said = train(105)
print(said, train(105)[1], train(5)[1])
gc.collect()
print(first() is None)
