"""The guard of a watch: what `w.guard(loader)` runs over."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghoststep.finding import Severity
from ghoststep.watching.checkpoints import GOOD_AFTER
from ghoststep.watching.rollback import COMPARED, EVERY, Guard
from ghoststep.watching.state_saver import Saver, StateSaver

if TYPE_CHECKING:
    from ghoststep.watching.forensics import BatchKeeper
    from ghoststep.watching.judge import Alarm
    from ghoststep.watching.recorder import Recorder
    from ghoststep.watching.watch import Watch

logger = logging.getLogger("ghoststep.watch")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What the run goes on from after a comparison: the number of its next step, the usual norms of its tensors, its kept batches."""

    number: int
    recorder: Recorder
    keeper: BatchKeeper | None


class WatchHost:
    """A `rollback_host.Host` on a started watch."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._num_seen = 0
        self._run: _Run | None = None

    def steps_done(self) -> int:
        """A step that is over counts before it is closed by the next forward."""
        builder = self._watch.builder
        return builder.number - 1 + (1 if builder.has_stepped else 0)

    def flush(self) -> None:
        """Judge everything up to here."""
        self._watch.flush()

    def judged_until(self) -> int:
        """The newest step in the window, 0 for none."""
        window = self._watch.flusher.window
        return window[-1].number if window else 0

    def new_errors(self) -> Sequence[int]:
        """Of alarms since the last call."""
        alarms = self._watch.flusher.alarms
        new, self._num_seen = alarms[self._num_seen :], len(alarms)
        return [a.step for a in new if a.severity is Severity.ERROR and a.step is not None]

    def take_rollback(self) -> Alarm | None:
        """What the policy wants."""
        return self._watch.flusher.policy.take_rollback()

    def losses(self, first: int, last: int) -> Sequence[float | None]:
        """Of the comparison while one runs, else from the window."""
        flusher = self._watch.flusher
        found = {s.number: s.loss for s in (flusher.window if flusher.aside is None else flusher.aside)}
        return [found.get(n) for n in range(first, last + 1)]

    def begin_comparison(self) -> None:
        """Put all steps up to here into the record, and none from here on."""
        watch, flusher = self._watch, self._watch.flusher
        watch.flush()
        self._run = _Run(number=watch.builder.number, recorder=copy.deepcopy(flusher.recorder), keeper=flusher.keeper)
        flusher.aside, flusher.keeper = [], None

    def end_comparison(self) -> None:
        """The run goes on where it was: its steps are counted, recorded and judged again."""
        run, self._run = self._run, None
        if run is None:
            return
        watch, flusher = self._watch, self._watch.flusher
        watch.flush()
        flusher.aside, flusher.recorder, flusher.keeper = None, run.recorder, run.keeper
        watch.builder.number = run.number
        watch.builder.abandon()

    def restarted(self) -> None:
        """Record what is over, then forget it as history."""
        self._watch.flush()
        self._watch.builder.abandon()
        self._watch.flusher.window.clear()
        self._watch.flusher.judge.restart()
        self._watch.flusher.policy.take_rollback()

    def stop(self, reason: str) -> None:
        """Through the policy, so that integrations stop too."""
        logger.error("%s", reason)
        self.event("stop", {"reason": reason})
        self._watch.flusher.policy.stop()

    def event(self, kind: str, payload: Mapping[str, Any]) -> None:
        """Into the record, where there is one."""
        spool = self._watch.flusher.spool
        if spool is not None:
            spool.write_event(kind, dict(payload))


def make_guard(
    watch: Watch,
    *,
    run_dir: Path | None,
    saver: Saver | None = None,
    stateful: Sequence[Any] = (),
    every: int = EVERY,
    good_after: int = GOOD_AFTER,
    compared: int = COMPARED,
) -> Guard | None:
    """The guard of a started watch, or None if no policy asks for a rollback: then batches just pass through.

    stateful: scheduler, GradScaler, ...: objects with state_dict and load_state_dict that go back with the weights; not used with a
    saver. every, good_after, compared: steps between checkpoints, until one is known to be good, and of the comparison.
    """
    policy = watch.flusher.policy
    policy.guarded()
    if not policy.needs_guard or run_dir is None:
        return None
    return Guard(
        host=WatchHost(watch),
        saver=saver or StateSaver(watch.model, watch.optimizers, [s for s in stateful if s is not None]),
        folder=run_dir / f"rank-{watch.flusher.facts.rank:05d}",
        every=every,
        good_after=good_after,
        compared=compared,
        remedy=our_clip,
    )


@contextlib.contextmanager
def our_clip() -> Iterator[None]:
    """Within it torch's `clip_grad_norm_`, under whatever name the loop imported it, clips as `ghoststep.clip_grad_norm_` does."""
    from torch.nn.utils import clip_grad

    from ghoststep.remedies.clip import clip_grad_norm_

    if not hasattr(clip_grad, "_clip_grads_with_norm_"):  # an older torch: the third side is then the same as the first
        yield
        return
    before = clip_grad._clip_grads_with_norm_
    is_inside = False

    def clip(parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None) -> None:
        nonlocal is_inside
        if is_inside or not max_norm > 0:
            before(parameters, max_norm, total_norm, foreach)
            return
        is_inside = True
        try:
            clip_grad_norm_(parameters, max_norm, foreach=foreach)
        finally:
            is_inside = False

    clip_grad._clip_grads_with_norm_ = clip
    try:
        yield
    finally:
        if clip_grad._clip_grads_with_norm_ is clip:
            clip_grad._clip_grads_with_norm_ = before
