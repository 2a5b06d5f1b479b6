"""What a rank writes while it trains, so that a process killed at any moment loses only what was never passed to `Spool.write`.

One call is one frame is one `os.write`: once it returns, the bytes are the system's, and no end of the process can take them back.
They are synced to the disk where a segment ends and at the end, not at each flush: an `fsync` can take tens of milliseconds of
training, and it only helps where the machine itself goes down (power, kernel); then the last steps may be missing, and what was
written before them is still readable. Nothing here raises into training: a record that cannot be written ends, with one warning.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ghoststep.durable import sync_folder
from ghoststep.errors import CannotLook, UsageError
from ghoststep.evidence.steps import Gap, RunFacts, Step
from ghoststep.run_folder import (
    FORMAT,
    HEADER,
    MANIFEST,
    RunHeader,
    Tail,
    encode_manifest,
    rank_folder,
    read_header,
    read_manifest,
    read_tail,
    segment_file,
)
from ghoststep.run_frames import CLOSED, EVENT, GAP, SEGMENT_BYTES, STEPS, FrameTooLargeError, encode_frame
from ghoststep.text import error_text, visible
from ghoststep.watching.spool_files import OPEN_FLAGS, hold_lock, replace_file, write_all, write_file

logger = logging.getLogger("ghoststep.watch")

RESUMED = "resumed"
RESUMED_AFTER_KILL = "resumed; the process before was killed or crashed, and steps that it had not flushed are lost"
_LIVING: weakref.WeakSet[Spool] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    kind: str
    at: float
    payload: Mapping[str, Any] = field(default_factory=dict)


class Spool:
    """The record of one rank, being written. Threads may call; a forked child (a data loader's worker) writes nothing.

    failed: why recording ended early, None while it works. last_number: number of the last step in the record, also of the processes
    before this one; the next step is `last_number + 1`. run_id: of the folder, given by its first process. unlocked: why a second
    writer would not be noticed (a file system without locks), else "".

    `UsageError` at once where the folder must not be written to: another process writes there, another model wrote there, a newer
    ghoststep, or it holds other things. Where it merely cannot be written (no permission, no space), `failed` says so.
    """

    segment_bytes = SEGMENT_BYTES

    def __init__(self, run_dir: Path, facts: RunFacts) -> None:
        self.run_dir = Path(run_dir)
        self.folder = rank_folder(self.run_dir, facts.rank)
        self.failed: str | None = None
        self.last_number = 0
        self.run_id = facts.run_id
        self.unlocked = ""
        self._facts = facts
        self._pid = os.getpid()
        self._busy = threading.RLock()  # re-entrant: a signal handler may close the spool in the middle of a write
        self._lock_file = self._segment = -1
        self._segment_number = self._size = self._frame_number = 0
        self._is_closed = False
        try:
            self._open()
        except UsageError:
            self._release()
            raise
        except Exception as error:
            self._fail(error)
        _LIVING.add(self)

    def write(self, steps: Sequence[Step]) -> None:
        """Add steps, numbers rising. When it returns they survive the process (unless `failed`)."""
        if steps:
            with self._guarded() as is_on:
                if is_on:
                    self._write_steps(list(steps))

    def write_event(self, kind: str, payload: Mapping[str, Any]) -> None:
        """Add something that happened: a finding told, an action of the policy, a hook that broke.

        payload: of plain values; what cannot be written is written as text. Kind "broken" with `hook` and `reason` comes back as
        `RunRecord.broken`.
        """
        with self._guarded() as is_on:
            if is_on:
                try:
                    self._append(EVENT, _Event(kind=kind, at=time.time(), payload=payload))
                except (TypeError, ValueError, RecursionError) as error:  # what cannot be said must not end the record
                    self._append(EVENT, _Event(kind=kind, at=time.time(), payload={"unwritable": error_text(error, 200)}))

    def update(self, facts: RunFacts) -> None:
        """Replace the manifest, atomically. Tokens that are known already stay. Cost: writes it anew if anything changed."""
        with self._guarded() as is_on:
            if is_on:
                merged = replace(
                    facts, run_id=self.run_id, started_at=self._facts.started_at, tokens={**self._facts.tokens, **facts.tokens}
                )
                if merged != self._facts:
                    replace_file(self.folder / MANIFEST, encode_manifest(merged))
                    self._facts = merged

    def close(self) -> None:
        """Say goodbye, wait for the disk, let the next writer in. May be called twice."""
        with self._guarded() as is_on:
            if is_on:
                self._append(CLOSED, {"at": time.time()})
                os.fsync(self._segment)
                sync_folder(self.folder)
        if os.getpid() == self._pid:
            with self._busy:
                self._is_closed = True
                self._release()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[bool]:
        """Whether there is still something to do; whatever goes wrong inside ends the record, not the training."""
        if os.getpid() != self._pid:  # before the lock, which another thread may have held while this child was forked
            yield False
            return
        with self._busy:
            try:
                yield self.failed is None and not self._is_closed
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        why = visible(error.strerror) if isinstance(error, OSError) and error.strerror else error_text(error)
        self.failed = f"{visible(str(self.folder))}: {why}"
        until = f"The steps up to {self.last_number} are kept" if self.last_number else "No step is recorded"
        logger.warning("the record of this run stopped: %s. %s; training goes on without a record.", self.failed, until)
        with contextlib.suppress(Exception):  # a word in the record, if there is room for it
            if self._segment >= 0:
                self._append(GAP, Gap(after=self.last_number, reason=f"recording stopped: {why}"))

    # Opening

    def _open(self) -> None:
        if self.run_dir.exists() and not self.run_dir.is_dir():
            raise UsageError(f"run_dir={str(self.run_dir)!r} is a file: name a new folder, or one of an earlier run")
        self.run_dir.mkdir(parents=True, exist_ok=True)
        header = self._claim()
        self.run_id = header.run_id
        self.folder.mkdir(exist_ok=True)
        self._lock_file, self.unlocked = hold_lock(self.folder)
        tail = read_tail(self.folder)
        self._facts = replace(self._facts, run_id=self.run_id)
        self._take_over(tail)
        self.last_number, self._segment_number = tail.last_number, tail.last_segment
        replace_file(self.folder / MANIFEST, encode_manifest(self._facts), sync=True)
        self._next_segment()
        if tail.last_segment:
            self._append(GAP, Gap(after=self.last_number, reason=RESUMED if tail.is_closed else RESUMED_AFTER_KILL))

    def _claim(self) -> RunHeader:
        """The folder's header; written here if this is the first process of all ranks that comes by."""
        with contextlib.suppress(FileNotFoundError):
            return self._known_header()
        others = [n for n in os.listdir(self.run_dir) if not n.startswith((".", "rank-", HEADER))]
        if others:
            raise UsageError(
                f"run_dir={str(self.run_dir)!r} holds other things ({sorted(others)[0]!r}, ...): name a new or an empty folder, or one "
                "of an earlier run"
            )
        import msgspec

        header = RunHeader(ghoststep_run=FORMAT, run_id=self.run_id, created_at=time.time())
        temporary = self.run_dir / f"{HEADER}.{self._facts.rank}.{self._pid}.tmp"
        try:
            write_file(temporary, msgspec.json.encode(header), sync=True)
            try:
                os.link(temporary, self.run_dir / HEADER)  # unlike a rename, it leaves the header of a rank that was faster
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                os.replace(temporary, self.run_dir / HEADER)
        finally:
            temporary.unlink(missing_ok=True)
        return self._known_header()

    def _known_header(self) -> RunHeader:
        try:
            return read_header(self.run_dir)
        except CannotLook as error:
            raise UsageError(
                f"run_dir={str(self.run_dir)!r} cannot be continued: {error}. Nothing was written to it; name another folder"
            ) from error

    def _take_over(self, tail: Tail) -> None:
        """Go on from the process before, unless that was another model's. What it knew about tokens and the start stays known."""
        try:
            before = read_manifest(self.folder)
        except CannotLook:
            return
        if tail.last_number and before.trainable != tuple(self._facts.trainable):
            raise UsageError(
                f"{self.folder} is the record of another model: {_difference(before.trainable, self._facts.trainable)}. "
                "Nothing was written to it; name another folder (run_dir=) for this run"
            )
        started = before.started_at or self._facts.started_at
        self._facts = replace(self._facts, started_at=started, tokens={**before.tokens, **self._facts.tokens})

    # Writing

    def _write_steps(self, steps: list[Step]) -> None:
        num_norm_bytes = sum(len(s.norms) for s in steps)
        try:  # norms hardly shrink, and many of them would take milliseconds to find that out
            self._append(STEPS, steps, level=0 if num_norm_bytes > 256 * len(steps) else 1)
        except FrameTooLargeError:
            if len(steps) > 1:
                middle = len(steps) // 2
                self._write_steps(steps[:middle])
                self._write_steps(steps[middle:])
            else:
                self._append(STEPS, [replace(steps[0], norms=b"")])
        except OSError:
            raise
        except Exception as error:  # these steps cannot be said; the next ones perhaps can
            why = f"steps {steps[0].number} to {steps[-1].number} could not be written: {error_text(error)}"
            self._append(GAP, Gap(after=self.last_number, reason=why[:500]))
        self.last_number = steps[-1].number

    def _append(self, kind: str, data: object, *, level: int = 1) -> None:
        frame = encode_frame(kind, data, number=self._frame_number, level=level)
        status = os.fstat(self._segment)
        if status.st_nlink == 0:
            raise OSError(errno.ENOENT, "the folder was removed")
        if status.st_size != self._size or (self._size and self._size + len(frame) > self.segment_bytes):
            # Another size than ours: somebody cut the file, or an interrupt left half a frame that could not be cut off.
            self._next_segment()
            frame = encode_frame(kind, data, number=self._frame_number, level=level)
        end = self._size + len(frame)
        try:
            write_all(self._segment, frame)
        finally:  # also when Ctrl-C came in between: what is whole counts, half a frame is cut off
            with contextlib.suppress(OSError):
                if os.fstat(self._segment).st_size == end:
                    self._size, self._frame_number = end, self._frame_number + 1
                else:
                    os.ftruncate(self._segment, self._size)

    def _next_segment(self) -> None:
        if self._segment >= 0:
            os.fsync(self._segment)
            os.close(self._segment)
            self._segment = -1
        self._segment_number += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | OPEN_FLAGS
        self._segment = os.open(segment_file(self.folder, self._segment_number), flags, 0o666)
        self._size = self._frame_number = 0
        sync_folder(self.folder)

    def _release(self) -> None:
        for descriptor in (self._segment, self._lock_file):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._segment = self._lock_file = -1


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    def some(names: list[str]) -> str:
        return f"{len(names)} ({', '.join(map(repr, names[:2]))}{', ...' if len(names) > 2 else ''})"

    gone, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    said = [
        f"{some(names)} {what}" for names, what in ((gone, "trained there and not here"), (new, "here and not there")) if names
    ]
    return "of its trainable tensors, " + " and ".join(said) if said else "it trains the same tensors in another order"


def _after_fork_in_child() -> None:
    """A child must not hold the lock: it could outlive us, and the next writer would be refused. Closing it here releases nothing."""
    for spool in list(_LIVING):
        spool._release()


_at_fork: Callable[..., None] | None = getattr(os, "register_at_fork", None)
if _at_fork is not None:
    _at_fork(after_in_child=_after_fork_in_child)
