"""Two models of one class, each with its own optimizer; the second one is never fed a gradient that is a number."""

from __future__ import annotations

import torch

torch.manual_seed(0)
first, second = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)) for _ in range(2))
optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (first, second)]
for _ in range(30):
    for model, optimizer, factor in zip((first, second), optimizers, (1.0, float("nan")), strict=True):
        optimizer.zero_grad()
        (model(torch.randn(8, 4)).pow(2).mean() * factor).backward()
        optimizer.step()
