"""One of two gloo ranks that train together, watched: python ranks_worker.py KIND RANK FOLDER STEPS.

The row of token 17 is next to nothing. On rank 1 the token stands in the middle of an example, where this Mamba-2 amplifies
(8 layers, zero conv biases: the first position does not); on rank 0, in the same steps, at the first position. Import the
package in one place, so that a second process can be started as a plain script.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GUILTY, PLACE, BAD_STEPS = 17, 8, (6, 11)


def built() -> Any:
    """The Mamba-2 of facts known to lose its steps, in its smallest comfortable size."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=160, hidden_size=32, num_hidden_layers=8, state_size=16, num_heads=4, head_dim=16, n_groups=1, chunk_size=16,
        tie_word_embeddings=False, use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = Mamba2ForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[GUILTY] = 1e-30  # type: ignore[no-untyped-call]
    return model


def wrapped(kind: str, model: Any) -> Any:
    """Under DDP or FSDP2."""
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model.backbone.layers:
        fully_shard(layer)
    return fully_shard(model)


def main(kind: str, rank: int, folder: Path, num_steps: int) -> None:
    """Trains; touches `started-RANK` after ten steps when it is to run on until it is killed."""
    import ghoststep

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    model = wrapped(kind, built())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(10 + rank)
    with ghoststep.watch(model, optimizer, run_dir=folder / "run", flush_steps=4) as w:
        for step in range(1, num_steps + 1):
            ids = torch.randint(20, 160, (2, 16), generator=generator)
            if step in BAD_STEPS:
                ids[1, PLACE if rank else 0] = GUILTY
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step == 10:
                (folder / f"started-{rank}").touch()
            if num_steps > 1000:
                time.sleep(0.01)
    assert not w.faults, w.faults.lines()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
