"""A process for each class, with a time limit and a memory limit, a few at a time: one bad class cannot stop the survey."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, cast

MEMORY_BYTES = 5 * 2**30
TIMEOUT_SECONDS = 240.0


def _child(work: Callable[..., Any], arguments: tuple[Any, ...], sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    sender.send(work(*arguments))
    sender.close()


def each(
    work: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], *, jobs: int, failed: Callable[[tuple[Any, ...], str], Any],
    done: Callable[[Any], None], timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Any]:  # fmt: skip
    """`work(*task)` for every task, in the order of the tasks; `failed(task, why)` for one that died or took too long."""
    context = get_context("fork")  # the libraries are imported once, in the parent, which runs no model
    waiting, results = list(enumerate(tasks)), dict[int, Any]()
    running: dict[Any, tuple[int, tuple[Any, ...], Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number, task = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(work, task, sender))
            process.start()
            sender.close()
            running[receiver] = (number, task, process, time.monotonic())
        for ready in wait(list(running), timeout=0.5):
            number, task, process, _ = running.pop(ready)
            try:
                results[number] = cast("Connection", ready).recv()
            except EOFError:
                process.join()
                results[number] = failed(task, f"its process ended with code {process.exitcode}")
            process.join()
            done(results[number])
        for late, (number, task, process, since) in list(running.items()):
            if time.monotonic() - since > timeout_seconds:
                process.kill()
                process.join()
                running.pop(late)
                results[number] = failed(task, f"took more than {timeout_seconds:.0f} s")
                done(results[number])
    return [results[n] for n in range(len(tasks))]
