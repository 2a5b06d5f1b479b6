"""A `Source` that counts what it reads and stops when time is up or the user says so.

The engine's alarm interrupts a measurement in the main thread only. The census measures in several threads, so here every
read looks at the clock: a measurement ends at its next block of table rows.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook

if TYPE_CHECKING:
    from ghoststep.subjects.base import Source


class Watched:
    """Same files, same bytes. `timeout_seconds` None means no limit; `stop` ends everything at the next read."""

    def __init__(self, source: Source, *, timeout_seconds: float | None, started: float, stop: threading.Event) -> None:
        self.name = source.name
        self.is_remote = source.is_remote
        self.was_cut_short = False
        self._source = source
        self._timeout_seconds = timeout_seconds
        self._started = started
        self._stop = stop
        self._lock = threading.Lock()
        self._asked_bytes = 0
        self.is_remote = source.is_remote

    @property
    def bytes_read(self) -> int:
        """Bodies received where the source counts them, else the bytes that were asked for."""
        received: int = getattr(self._source, "bytes_received", 0)
        return received or self._asked_bytes

    @property
    def remaining_seconds(self) -> float | None:
        """Time left, never negative; None without a limit."""
        if self._timeout_seconds is None:
            return None
        return max(0.0, self._started + self._timeout_seconds - time.monotonic())

    def files(self) -> tuple[str, ...]:
        """As the source."""
        return self._source.files()

    def size(self, file: str) -> int:
        """As the source."""
        return self._source.size(file)

    def read(self, file: str, start: int, stop: int) -> memoryview | bytes:
        """As the source; `CannotLook` when time is up."""
        self._look_at_the_clock(file)
        try:
            data = self._source.read(file, start, stop)
        except CannotLook:
            self.was_cut_short = self.was_cut_short or self.is_remote
            raise
        self._count(stop - start)
        return data

    def read_whole(self, file: str, *, limit_bytes: int) -> bytes:
        """As the source; `CannotLook` when time is up."""
        self._look_at_the_clock(file)
        try:
            data = self._source.read_whole(file, limit_bytes=limit_bytes)
        except CannotLook:
            self.was_cut_short = self.was_cut_short or self.is_remote
            raise
        self._count(len(data))
        return data

    def close(self) -> None:
        """Close the source's connections, if it has any."""
        close = getattr(self._source, "close", None)
        if close is not None:
            close()

    def _look_at_the_clock(self, file: str) -> None:
        if self._stop.is_set():
            self.was_cut_short = True
            raise CannotLook(f"{self.name}: stopped before {file} was read")
        if self.remaining_seconds == 0.0:
            self.was_cut_short = True
            raise CannotLook(f"{self.name}: out of time: --timeout {self._timeout_seconds:g} s passed while {file} was read")

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._asked_bytes += num_bytes
