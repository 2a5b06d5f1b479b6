"""DDP on gloo; the token that loses a step is on the second rank."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from tests.launch.scripts.toys import batches, digest, loss_of, model


def train() -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gates = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(gates.parameters(), lr=1e-3)
    for ids in batches(20, *([12] if rank == 1 else []), seed=rank):
        loss_of(gates(ids), ids).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(gates.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    return digest(gates.module)


if __name__ == "__main__":
    said = train()
    if os.environ["RANK"] == "0":
        print(said)
