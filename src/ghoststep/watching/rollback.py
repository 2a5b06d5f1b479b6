"""`for batch in w.guard(loader)`: batches as they come, and after an alarm whose policy is "rollback" a way back.

Between two batches, when the loop's body is over, the guard restores the last checkpoint that is known to be good, puts the guilty
batch in quarantine, and compares: it yields the guilty batch and a few others, then restores again and yields the same few without
it. The loop trains on them as on any other batch, so that its own loss, clipping and optimizer are compared; their losses go into an
event, and these steps are no steps of the run. At the end the good state is back, bit for bit, and the loop goes on with the batches
since then, but for the guilty one: the run becomes what it would have been without that batch. Counters of the loop's own count
every batch that is yielded.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ghoststep.watching.checkpoints import GOOD_AFTER, Checkpoint, Checkpoints
from ghoststep.watching.judge import Alarm
from ghoststep.watching.quarantine import Quarantine
from ghoststep.watching.rollback_host import Host
from ghoststep.watching.state_saver import Saver

logger = logging.getLogger("ghoststep.watch")

EVERY = 64
"""Steps from one checkpoint to the next."""

COMPARED = 8
"""Steps that each side of the comparison trains, after the guilty one."""

MAX_ROLLBACKS = 8
"""After so many the loop is asked to stop: the batches are not the cause."""

FLUSHED = 32
"""Steps between two flushes: so much later than the step an alarm may come."""

MAX_BYTES = 256 << 20
"""Of the batches that are held so that they can be trained on again (references, not copies). The oldest are let go beyond it."""

Remedy = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(slots=True, kw_only=True)
class _Fed:
    """A batch that was yielded: pass over the loader, place in it (both from 0), and the step it went into."""

    epoch: int
    index: int
    step: int
    batch: Any
    num_bytes: int = 0

    def place(self) -> dict[str, int]:
        """For the record."""
        return {"epoch": self.epoch, "index": self.index, "step": self.step}


@dataclass(slots=True, kw_only=True)
class Guard:
    """One a watch; `over` may run several times (epochs). remedy: a context in which the loop trains with the remedy, such as
    `ghoststep.clip_grad_norm_` in the place of torch's; then the comparison has a third side. compared: 0 for no comparison."""

    host: Host
    saver: Saver
    folder: Path
    every: int = EVERY
    good_after: int = GOOD_AFTER
    compared: int = COMPARED
    max_rollbacks: int = MAX_ROLLBACKS
    remedy: Remedy | None = None
    num_rollbacks: int = 0
    num_left_out: int = 0
    _fed: deque[_Fed] = field(default_factory=deque)
    _num_bytes: int = 0
    _epoch: int = -1
    _checkpoints: Checkpoints | None = None
    _quarantine: Quarantine | None = None

    def start(self) -> None:
        """The first checkpoint. `UsageError` if the state cannot be saved."""
        if self._checkpoints is None:
            checkpoints = Checkpoints(saver=self.saver, folder=self.folder / "checkpoints", good_after=self.good_after)
            checkpoints.start(self.host.steps_done())
            self._checkpoints, self._quarantine = checkpoints, Quarantine(self.folder)

    def close(self) -> None:
        """Delete the checkpoints."""
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None

    def over(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, without those in quarantine; see the module."""
        self.start()
        self._epoch += 1
        source = _Source(loader, self._epoch)
        last_done = self.host.steps_done()
        while True:
            for epoch, index, batch in source:
                assert self._quarantine is not None
                if batch in self._quarantine:
                    self.num_left_out += 1
                    self.host.event("batch-left-out", {"epoch": epoch, "index": index})
                    continue
                self._remember(epoch, index, batch)
                yield batch
                done = self.host.steps_done()
                if done != last_done:  # not amid accumulation: the gradients of half a step would be lost
                    alarm = self._look(done)
                    if alarm is not None:
                        yield from self._roll_back(alarm, source)
                last_done = self.host.steps_done()
            self.host.flush()
            alarm = self._look(self.host.steps_done())
            if alarm is None:
                return
            yield from self._roll_back(alarm, source)
            if not source.has_more:
                return
            last_done = self.host.steps_done()

    def _remember(self, epoch: int, index: int, batch: Any) -> None:
        step = self.host.steps_done() + 1
        # A shallow copy: the loop may pop entries.
        fed = _Fed(epoch=epoch, index=index, step=step, batch=_shallow(batch), num_bytes=_num_bytes(batch))
        self._fed.append(fed)
        self._num_bytes += fed.num_bytes
        oldest = step - self.good_after - self.every - 2 * FLUSHED
        while len(self._fed) > 1 and (self._fed[0].step < oldest or self._num_bytes > MAX_BYTES):
            self._num_bytes -= self._fed.popleft().num_bytes

    def _look(self, done: int) -> Alarm | None:
        checkpoints = self._checkpoints
        assert checkpoints is not None
        alarm = self.host.take_rollback()
        checkpoints.judged(self.host.judged_until(), self.host.new_errors())
        if alarm is None and done - checkpoints.last_step >= self.every:
            checkpoints.take(done)
        return alarm

    def _roll_back(self, alarm: Alarm, source: _Source) -> Iterator[Any]:
        checkpoints = self._checkpoints
        assert checkpoints is not None
        now = self.host.steps_done()
        to = checkpoints.before(alarm.step if alarm.step is not None else now)
        if to is None or self.num_rollbacks >= self.max_rollbacks:
            reason = (
                f"the policy rolled back {self.num_rollbacks} times already: the cause is not in single batches"
                if to is not None
                else "there is no checkpoint from before the error"
            )
            self.host.stop(f"{alarm.code} {alarm.name}: {reason}; the loop is asked to stop")
            return
        self.num_rollbacks += 1
        guilty = self._guilty(alarm)
        whole_step = [f for f in self._fed if f.step == alarm.step]
        hashes = self._put_in_quarantine(guilty, alarm)
        undone = [f for f in self._fed if f.step > to.step]
        source.put_back([(f.epoch, f.index, f.batch) for f in undone if all(f is not g for g in guilty)])
        self._fed.clear()
        self._num_bytes = 0
        num_missing = now - to.step - len({f.step for f in undone})
        self._say(alarm, to, now, guilty, num_missing)
        self.host.event(
            "rollback",
            {
                "code": alarm.code, "error_step": alarm.step, "at_step": now, "to_step": to.step, "is_known_good": not to.is_start,
                "steps_not_at_hand": num_missing,
                "guilty": [{**f.place(), "sha256": h} for f, h in zip(guilty, hashes, strict=True)],
            },
        )  # fmt: skip
        try:
            yield from self._compare(whole_step, to, source)
        finally:  # also when the loop breaks out of a comparison
            self._restore(to)
            checkpoints.rolled_back(to, self.host.steps_done())
            self.host.new_errors()  # those of the undone steps are part of the same story

    def _guilty(self, alarm: Alarm) -> list[_Fed]:
        """The micro-batch that the finding names, else every one of its step."""
        of_step = [f for f in self._fed if f.step == alarm.step]
        micro = alarm.finding.where.micro_batch
        return [of_step[micro]] if micro is not None and 0 <= micro < len(of_step) else of_step

    def _put_in_quarantine(self, guilty: Sequence[_Fed], alarm: Alarm) -> list[str]:
        assert self._quarantine is not None
        return [self._quarantine.add(f.batch, {**f.place(), "code": alarm.code, "name": alarm.name}) for f in guilty]

    def _say(self, alarm: Alarm, to: Checkpoint, now: int, guilty: Sequence[_Fed], num_missing: int) -> None:
        where = ", ".join(f"batch {f.index} of pass {f.epoch}" for f in guilty) or "no batch (it is no longer at hand)"
        state = "where the guard began; none is known to be good yet" if to.is_start else "known to be good"
        logger.warning(
            "%s %s: rolling back from step %d to the state after step %d (%s); left out from now on: %s%s",
            alarm.code, alarm.name, now, to.step, state, where,
            f"; {num_missing} steps cannot be made again, their batches are no longer at hand" if num_missing else "",
        )  # fmt: skip

    def _restore(self, to: Checkpoint) -> None:
        assert self._checkpoints is not None
        self._checkpoints.restore(to)
        self.host.restarted()

    def _compare(self, guilty: Sequence[_Fed], to: Checkpoint, source: _Source) -> Iterator[Any]:
        """Train from the good state with and without the guilty step; report the difference of the mean losses afterwards."""
        if not self.compared or not guilty:
            return
        following = source.peek(self.compared * len(guilty))  # whole steps, also under accumulation
        following = [b for b in following if b not in (self._quarantine or ())]
        following = following[: len(following) // len(guilty) * len(guilty)]
        if not following:
            return
        bad = [f.batch for f in guilty]
        sides: list[tuple[str, list[Any], Remedy | None]] = [("with", [*bad, *following], None), ("without", following, None)]
        if self.remedy is not None:
            sides.append(("with remedy", [*bad, *following], self.remedy))
        means: dict[str, float | None] = {}
        self.host.begin_comparison()
        try:
            for side, batches, remedy in sides:
                self._restore(to)
                first = self.host.steps_done()
                with remedy() if remedy is not None else contextlib.nullcontext():
                    for batch in batches:
                        yield _shallow(batch)
                self.host.flush()
                last = self.host.steps_done()
                num = len(following) // len(guilty)
                means[side] = _mean(self.host.losses(max(first, last - num) + 1, last))
        finally:
            self.host.end_comparison()
        self._report(means, len(following) // len(guilty))

    def _report(self, means: Mapping[str, float | None], num_steps: int) -> None:
        bad, good = means.get("with"), means.get("without")
        difference = None if bad is None or good is None else bad - good
        self.host.event("comparison", {"steps": num_steps, "mean_loss": dict(means), "difference": difference})
        logger.warning(
            "the %d steps after it: mean loss %s with the batch, %s without it%s",
            num_steps, _shown(bad), _shown(good),
            f", {_shown(means['with remedy'])} with the remedy" if "with remedy" in means else "",
        )  # fmt: skip


class _Source:
    """A loader with a place for batches that come again or were looked at ahead: (pass, index, batch)."""

    def __init__(self, loader: Iterable[Any], epoch: int) -> None:
        self._iterator = ((epoch, i, batch) for i, batch in enumerate(loader))
        self._ahead: deque[tuple[int, int, Any]] = deque()

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        return self

    def __next__(self) -> tuple[int, int, Any]:
        return self._ahead.popleft() if self._ahead else next(self._iterator)

    @property
    def has_more(self) -> bool:
        """True if something was put back."""
        return bool(self._ahead)

    def put_back(self, items: Sequence[tuple[int, int, Any]]) -> None:
        """These come next, in this order."""
        self._ahead.extendleft(reversed(items))

    def peek(self, number: int) -> list[Any]:
        """The next batches, which still come in their turn."""
        while len(self._ahead) < number:
            item = next(self._iterator, None)
            if item is None:
                break
            self._ahead.append(item)
        return [batch for _, _, batch in list(self._ahead)[:number]]


def _num_bytes(batch: Any) -> int:
    """Of the tensors in a batch, as far as two levels down."""
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else (batch,)
    flat = [v for one in inner for v in (one.values() if isinstance(one, Mapping) else (one,))]
    return sum(v.numel() * v.element_size() for v in flat if hasattr(v, "element_size"))


def _shallow(batch: Any) -> Any:
    return copy.copy(batch) if isinstance(batch, (MutableMapping, list)) else batch


def _mean(losses: Sequence[float | None]) -> float | None:
    """None if a loss was not seen; NaN and inf come through: they are the answer."""
    seen = [x for x in losses if x is not None]
    return sum(seen) / len(seen) if seen and len(seen) == len(losses) else None


def _shown(loss: float | None) -> str:
    return "unknown" if loss is None else ("NaN" if math.isnan(loss) else f"{loss:.4g}")
