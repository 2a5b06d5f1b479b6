"""Finished records in a file, one JSON line each, so that a census can be continued.

A line is written and synced as soon as its checkpoint is done. A run that was killed leaves at most one torn line, the last:
it is ignored and its checkpoint is measured again. The later of two lines with one key counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ghoststep.census.record import STATE_VERSION, Record, Status
from ghoststep.errors import UsageError

MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    ghoststep_census_state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    key: str
    record: Record


_HEADER = b'{"ghoststep_census_state":%d}\n' % STATE_VERSION


class Spool:
    """What an earlier run finished, and where this one writes. `num_torn` lines could not be read."""

    def __init__(self, finished: dict[str, Record], file: IO[bytes] | None, num_torn: int = 0) -> None:
        self._finished = finished
        self._file = file
        self.num_torn = num_torn

    def __len__(self) -> int:
        return len(self._finished)

    def get(self, key: str) -> Record | None:
        """The finished record with this key; failed ones and those cut short by time or the network are not finished."""
        return self._finished.get(key)

    def append(self, key: str, record: Record) -> None:
        """Write one line and wait until it is on the disk. `UsageError` when the disk is full or the file is gone."""
        if self._file is None:
            return
        import msgspec

        try:
            self._file.write(msgspec.json.encode(_Line(key=key, record=record)) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UsageError(f"--state {self._file.name}: cannot be written: {error.strerror}") from error


@contextmanager
def open_spool(path: Path | None) -> Iterator[Spool]:
    """Read the state and open it for appending; without a path nothing is kept. Memory: the finished records.

    `UsageError` for a file that is no census state, or one of another version: it is left as it is.
    """
    if path is None:
        yield Spool({}, None)
        return
    try:
        with path.open("a+b") as file:  # appending: a second census on the same state adds lines and overwrites none
            file.seek(0)
            finished, num_torn = _read(file, path)
            yield Spool(finished, file, num_torn)
    except OSError as error:
        raise UsageError(f"--state {path}: cannot be read and written: {error.strerror}") from error


def _read(file: IO[bytes], path: Path) -> tuple[dict[str, Record], int]:
    """Every finished record; leaves the file with a whole last line."""
    import msgspec

    first = file.readline(MAX_LINE_BYTES)
    if not first.endswith(b"\n") and _HEADER.startswith(first):  # new, or killed while the header was written
        file.truncate(0)
        file.write(_HEADER)
        file.flush()
        return {}, 0
    try:
        header = msgspec.json.decode(first, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--state {path} is no census state (its first line says otherwise): nothing was written to it. Name a new file"
        ) from error
    if header.ghoststep_census_state != STATE_VERSION:
        raise UsageError(
            f"--state {path} has version {header.ghoststep_census_state}, this ghoststep writes {STATE_VERSION}: name a new file"
        )
    finished: dict[str, Record] = {}
    num_torn, ends_clean = 0, True
    while line := file.readline(MAX_LINE_BYTES):
        ends_clean = line.endswith(b"\n")
        try:
            parsed = msgspec.json.decode(line, type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            num_torn += 1
            continue
        if parsed.record.status is Status.FAILED or parsed.record.retry:
            finished.pop(parsed.key, None)
        else:
            finished[parsed.key] = parsed.record
    if not ends_clean:
        file.write(b"\n")  # the torn line stays, ended: what follows must not be glued to it
    return finished, num_torn
