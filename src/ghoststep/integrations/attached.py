"""What the callbacks share: a watch that starts when a trainer's training starts and ends when it ends, however it ends."""

from __future__ import annotations

import atexit
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghoststep.errors import UsageError
from ghoststep.finding import Report

if TYPE_CHECKING:
    from ghoststep.watching.watch import Watch


class Attached:
    """The watch of one callback; a new one for each training that the callback sees.

    Arguments are those of `ghoststep.watch`, and are refused at once (`UsageError`) where they cannot be used. Tokenizer and scheduler
    are the trainer's own unless they are given. The watch is made when training begins: a training that never does leaves none behind
    that would say it was never started.
    """

    def __init__(
        self, *, run_dir: str | Path | None = None, policy: str | Mapping[str, str] | None = None, sinks: Sequence[Any] = (),
        **options: Any,
    ) -> None:  # fmt: skip
        from ghoststep.watching import given
        from ghoststep.watching.setting_up import make_wishes

        self._options = {"run_dir": run_dir, "policy": policy, "sinks": given.sinks(sinks), **options}
        unknown = sorted(set(options) - set(inspect.signature(make_wishes).parameters))
        if unknown:
            raise UsageError(
                f"ghoststep.watch has no argument {unknown[0]!r} (a callback takes those beside model and optimizer)"
            )
        make_wishes(**self._options)
        self.watch: Watch | None = None

    def begin(self, model: Any, optimizers: Iterable[Any], **found: Any) -> None:
        """Start. found: what the trainer has beside them; what the user gave goes before it.

        A trainer's optimizer that holds no parameter of the model (DeepSpeed keeps copies) is told by a warning and never refused, and
        what a watch has no use for (an image processor in a tokenizer's place) is left out: the user gave neither to us.
        """
        from ghoststep.watching import given
        from ghoststep.watching.watch import watch

        self.end()  # an earlier training that broke off
        known = {name: value for name, value in found.items() if value is not None and given.HELPERS[name][0](value)}
        bare = [o for optimizer in optimizers if given.is_optimizer(o := unwrapped(optimizer))]
        self.watch = None
        made = watch(model, bare or None, **{**known, **self._options})
        made.refuses_others = False
        self.watch = made.start()
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
