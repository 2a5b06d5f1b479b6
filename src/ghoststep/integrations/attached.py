"""What the callbacks share: a watch that starts when a trainer's training starts and ends when it ends, however it ends."""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghoststep.errors import UsageError
from ghoststep.finding import Report

if TYPE_CHECKING:
    from ghoststep.watching.watch import Watch


class Attached:
    """The watch of one callback; a new one for each training that the callback sees.

    Arguments are those of `ghoststep.watch`. Tokenizer and scheduler are the trainer's own unless they are given.
    """

    def __init__(
        self, *, run_dir: str | Path | None = None, policy: str | Mapping[str, str] | None = None, sinks: Sequence[Any] = (),
        **options: Any,
    ) -> None:  # fmt: skip
        self._options = {"run_dir": run_dir, "policy": policy, "sinks": sinks, **options}
        self.watch: Watch | None = None

    def begin(self, model: Any, optimizers: Iterable[Any], **found: Any) -> None:
        """Start. found: what the trainer has beside them; what the user gave goes before it."""
        from ghoststep.watching.watch import watch

        self.end()  # an earlier training that broke off
        known = {name: value for name, value in found.items() if value is not None}
        bare = [unwrapped(optimizer) for optimizer in optimizers if optimizer is not None]
        self.watch = None
        self.watch = watch(model, bare or None, **{**known, **self._options}).start()
        atexit.register(self.end)  # a trainer calls nothing of ours when training raises

    @property
    def should_stop(self) -> bool:
        """True once a policy "stop" met an alarm."""
        return self.watch is not None and self.watch.should_stop

    def end(self) -> None:
        """Flush, judge, close; never raises. May be called twice."""
        atexit.unregister(self.end)
        if self.watch is not None:
            self.watch.close()

    def raise_pending(self) -> None:
        """A policy "raise" that waits for a safe place."""
        if self.watch is not None:
            self.watch.step()

    def report(self) -> Report:
        """Every check's verdict about the last training, also while it runs."""
        if self.watch is None:
            raise UsageError("the callback has seen no training yet")
        return self.watch.report()


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside what Accelerate makes of it: the one whose `step` runs."""
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    return optimizer
