"""Ends in the way that its argument names, with a lost step behind it."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from tests.launch.scripts.toys import batches, loss_of, model


def train() -> None:
    gates = model()
    optimizer = torch.optim.SGD(gates.parameters(), lr=1e-2)
    for ids in batches(40, 12):
        loss_of(gates(ids), ids).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(gates.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def end(how: str) -> None:
    if how == "crash":
        raise ValueError("the script's own")
    if how == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if how == "hard":
        os._exit(9)
    if how == "wait":
        print("trained", flush=True)
        time.sleep(60)
    sys.exit(how if how == "words" else int(how))


if __name__ == "__main__":
    train()
    end(sys.argv[1])
