"""One of two gloo ranks that train a tiny model under DDP, watched: python apart_worker.py KIND RANK FOLDER STEPS.

A kind is words joined by "+": what the loop calls, how it reduces, how it accumulates and clips.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

NUM_MICRO = 3


def reduced(ddp: Any) -> None:
    """By hand, as loops do that call the model itself."""
    for p in ddp.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2


def main(kind: str, rank: int, folder: Path, num_steps: int) -> None:
    """Rank 1 has its own data; with "uneven" more of it, with "late" its watch begins three steps later."""
    import ghoststep
    from tests.watch.loops import VOCAB, TinyLM, tokens

    words = kind.split("+")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    torch.manual_seed(0)
    ddp: Any = DistributedDataParallel(TinyLM())
    if "fp16-hook" in words:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        ddp.register_comm_hook(None, fp16_compress_hook)
    called = ddp.module if "inside" in words else ddp
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    num_micro = NUM_MICRO if "accumulated" in words else 1
    batch = 4 if "uneven" not in words or not rank else 9
    made = ghoststep.watch(ddp, optimizer, run_dir=folder / "run", flush_steps=8)
    with contextlib.ExitStack() as stack:
        for step in range(num_steps):
            if step == (3 if "late" in words and rank else 0):
                w = stack.enter_context(made)
            optimizer.zero_grad()
            for micro in range(num_micro):
                is_local = "never-synced" in words or ("accumulated" in words and micro < num_micro - 1)
                with ddp.no_sync() if is_local else contextlib.nullcontext():
                    ids = tokens(2 * (num_micro * step + micro) + ("same" not in words) * rank, batch=batch)
                    loss = functional.cross_entropy(called(ids)[:, :-1].reshape(-1, VOCAB), ids[:, 1:].flatten())
                    loss.backward()  # type: ignore[no-untyped-call]
            if "by-hand" in words:
                reduced(ddp)
            if "clipped" in words:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-2)
            optimizer.step()
    assert not w.faults, w.faults.lines()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
