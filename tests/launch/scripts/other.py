"""A training of another model than the other scripts train: healthy, unless the argument is "bad"."""

from __future__ import annotations

import sys

import torch
from tests.launch.scripts.toys import VOCAB, batches, loss_of

torch.manual_seed(0)
other = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB))
optimizer = torch.optim.SGD(other.parameters(), lr=1e-2)
for step, ids in enumerate(batches(40), 1):
    factor = float("nan") if step == 12 and sys.argv[1:] == ["bad"] else 1.0
    (loss_of(other(ids), ids) * factor).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
