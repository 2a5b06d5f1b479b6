"""A healthy training of another model than the other scripts train."""

from __future__ import annotations

import torch
from tests.launch.scripts.toys import VOCAB, batches, loss_of

torch.manual_seed(0)
other = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB))
optimizer = torch.optim.SGD(other.parameters(), lr=1e-2)
for ids in batches(40):
    loss_of(other(ids), ids).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
