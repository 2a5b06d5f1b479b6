"""Two ranks under DDP call the model inside the wrapper, and each trains a model of its own.

## What people see
Two processes, both busy, twice the tokens a second; the loss of rank 0 falls well.

## What really happens
DDP reduces gradients only after a forward of its wrapper. `ddp.module(x)` goes past it: the gradients of the ranks differ, their
weights drift apart, and the checkpoint that rank 0 writes has seen half of the data.

## The cure
`ddp(x)`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import ghoststep

HARM = "distance of the weights of the two ranks, over their norm"
HARMLESS = 1e-6
V, D, STEPS, SECONDS = 32, 24, 40, 300
RUNS: list[tempfile.TemporaryDirectory[str]] = []
"""Kept until the process ends, and removed then."""


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
    """Texts that count upwards."""
    return (torch.randint(0, V, (8, 1), generator=torch.Generator().manual_seed(seed)) + torch.arange(12)) % V


def train(folder: Path, rank: int, kind: str) -> None:
    """One rank's part, in a process of its own."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ddp = nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    called = ddp if kind == "cured" else ddp.module
    with ghoststep.watch(ddp, optimizer, run_dir=folder / "run"):
        for step in range(STEPS):
            ids = make_batch(2 * step + rank)
            optimizer.zero_grad()
            functional.cross_entropy(called(ids).flatten(0, 1), ids[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
    torch.save(ddp.module.state_dict(), folder / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def both(kind: str) -> str:
    """Two processes that train together; the folder of their record."""
    RUNS.append(tempfile.TemporaryDirectory())
    folder = RUNS[-1].name
    ranks = [subprocess.Popen([sys.executable, __file__, folder, str(rank), kind]) for rank in range(2)]
    try:
        codes = [p.wait(timeout=SECONDS) for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    if any(codes):
        raise RuntimeError("a rank failed: gloo needs the loopback interface")
    return f"{folder}/run"


def broken() -> str:
    """Past the wrapper."""
    return both("broken")


def cured() -> str:
    """Through it."""
    return both("cured")


def harm(run: str) -> float:
    """Of the weights that each rank has at the end."""
    states = [torch.load(Path(run).parent / f"rank-{rank}.pt") for rank in range(2)]
    first, second = (torch.cat([t.flatten() for t in state.values()]) for state in states)
    return float((first - second).norm() / first.norm())


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
