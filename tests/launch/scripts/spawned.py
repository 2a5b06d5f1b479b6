"""Training in processes of multiprocessing; the parent trains nothing itself."""

from __future__ import annotations

import os
import sys

import torch
from tests.launch.scripts.ranks import train
from torch.multiprocessing.spawn import start_processes


def work(rank: int, port: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    train()


if __name__ == "__main__":
    start_processes(work, (sys.argv[2],), nprocs=2, start_method=sys.argv[1])  # type: ignore[no-untyped-call]
