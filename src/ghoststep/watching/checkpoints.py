"""Checkpoints to roll back to: which of them are known to be good, and which are thrown away."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ghoststep.errors import GhoststepError, UsageError
from ghoststep.text import error_text
from ghoststep.watching.guarded import traceback_text
from ghoststep.watching.state_saver import Saver, StateSaver

logger = logging.getLogger("ghoststep.watch")

GOOD_AFTER = 64
"""Steps without an error after a checkpoint until it is known to be good: two flushes."""

NUM_GOOD = 3
"""Good checkpoints that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state after `step` steps. is_start: where the guard began."""

    step: int
    path: Path
    is_start: bool = False


@dataclass(slots=True, kw_only=True)
class Checkpoints:
    """Those of one run, by step; files that are no longer needed are deleted.

    A checkpoint is known to be good once `good_after` steps after it have been judged and none of them began an error. failed: why
    the last one could not be written, "" if it could.
    """

    saver: Saver
    folder: Path
    good_after: int = GOOD_AFTER
    failed: str = ""
    _taken: list[Checkpoint] = field(default_factory=list)
    _bad_steps: list[int] = field(default_factory=list)
    _judged_until: int = 0

    def start(self, step: int) -> None:
        """The first one: `UsageError` if the state cannot be saved, or not be read again."""
        path = self.folder / f"step-{step:06d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob("step-*"):  # of the process before; a resumed run brings its own state
                _remove(old)
            self.saver.save(str(path))
            if isinstance(self.saver, StateSaver):
                self.saver.verify(str(path))
        except Exception as error:
            text = error_text(error, 300)
            raise UsageError(
                f'policy "rollback" cannot work here: the state cannot be saved and read again ({text}); '
                "give a saver with save(path) and load(path)"
            ) from error
        self._taken = [Checkpoint(step=step, path=path, is_start=True)]

    def take(self, step: int) -> None:
        """Save the state after this step. A disk that refuses is told once; training goes on with the older ones."""
        path = self.folder / f"step-{step:06d}"
        try:
            self.saver.save(str(path))
        except Exception as error:
            if not self.failed:
                logger.warning(
                    "no checkpoint could be written after step %d; training goes on with the older ones\n%s",
                    step,
                    traceback_text(error),
                )
            self.failed = error_text(error)
            _remove(path)
            return
        self.failed = ""
        self._taken.append(Checkpoint(step=step, path=path))

    @property
    def last_step(self) -> int:
        """Of the newest one."""
        return max((c.step for c in self._taken), default=0)

    def judged(self, until: int, bad_steps: Sequence[int]) -> None:
        """Steps up to `until` have been judged; errors began at `bad_steps`. Deletes what is no longer of use."""
        self._judged_until = max(self._judged_until, until)
        self._bad_steps = (self._bad_steps + list(bad_steps))[-1000:]
        good = [c for c in self._taken if self._is_good(c)]
        waiting = [c for c in self._taken if not self._is_followed_by_error(c) and not self._is_good(c)]
        start = [] if good else [c for c in self._taken if c.is_start]
        kept = {c.step for c in (*good[-NUM_GOOD:], *waiting, *start)}
        self._drop([c for c in self._taken if c.step not in kept])

    def _is_followed_by_error(self, checkpoint: Checkpoint) -> bool:
        return any(checkpoint.step < bad <= checkpoint.step + self.good_after for bad in self._bad_steps)

    def _is_good(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.step + self.good_after <= self._judged_until and not self._is_followed_by_error(checkpoint)

    def before(self, bad_step: int) -> Checkpoint | None:
        """The newest good one before an error, else the start, if that is before it."""
        good = [c for c in self._taken if self._is_good(c) and c.step < bad_step]
        return max(good, key=lambda c: c.step, default=None) or next(
            (c for c in self._taken if c.is_start and c.step < bad_step), None
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load it. `GhoststepError` if that fails: nobody knows then what the weights are."""
        try:
            self.saver.load(str(checkpoint.path))
        except Exception as error:
            raise GhoststepError(
                f"rolling back to the checkpoint after step {checkpoint.step} failed ({error_text(error)}): the model "
                "may be half restored; restart from a checkpoint of your own"
            ) from error

    def rolled_back(self, to: Checkpoint, now: int) -> None:
        """The steps after `to` are undone: their checkpoints go. now: the number of steps so far, which goes on counting."""
        self._drop([c for c in self._taken if c.step > to.step])
        self._bad_steps.clear()
        self._judged_until = max(self._judged_until, now)

    def _drop(self, checkpoints: Sequence[Checkpoint]) -> None:
        for checkpoint in checkpoints:
            self._taken.remove(checkpoint)
            _remove(checkpoint.path)

    def close(self) -> None:
        """Delete all of them: they were for rolling back, not for keeping."""
        self._drop(list(self._taken))
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
