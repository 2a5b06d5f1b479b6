"""Putting things back must not be cut short: an alarm or a Ctrl-C that comes meanwhile waits until it is done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_open: list[None] = []
"""One entry for each `undisturbed` block that the main thread is in."""


def is_undisturbed() -> bool:
    """True while something is being put back in the main thread; the alarm of `--timeout` then waits for its next ring."""
    return bool(_open)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, Ctrl-C is held back and raised on leaving. In another thread than the main one nothing needs to be held back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[Any, ...]] = []
    depth = len(_open)
    try:  # before the entry is made: a Ctrl-C right after it must not leave it behind
        _open.append(None)
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous) and len(_open) == 1:
            signal.signal(signal.SIGINT, lambda *given: held.append(given))
        try:
            yield
        finally:
            if callable(previous) and len(_open) == 1:
                signal.signal(signal.SIGINT, previous)
    finally:
        del _open[depth:]
    if held and callable(previous):
        previous(*held[0])
