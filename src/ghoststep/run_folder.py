"""Where things stand in a run folder: its header, and for each rank a manifest, segments and a lock.

RUN/ghoststep-run.json         version of the format, id of the run
RUN/rank-00000/manifest.json   `RunFacts`
RUN/rank-00000/000001.seg      frames (`run_frames`), 8 MiB a segment
RUN/rank-00000/lock            held by the process that writes
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ghoststep.errors import CannotLook, UnsafeInput, UsageError
from ghoststep.evidence.steps import Gap, RunFacts, Step
from ghoststep.run_frames import CLOSED, GAP, STEPS, Frame, SegmentReader, open_regular, plain_data

FORMAT = 1
HEADER = "ghoststep-run.json"
MANIFEST = "manifest.json"
LOCK = "lock"
MAX_MANIFEST_BYTES = 8 << 20
MAX_HEADER_BYTES = 1 << 16
MAX_ENTRIES = 100_000
"""Files or folders in a folder that are looked at."""

_RANK = re.compile(r"rank-([0-9]{5,9})")
_SEGMENT = re.compile(r"([0-9]{6,9})\.seg")
MAX_NUMBER = 10**15
"""Of a step: far beyond any run, far from where numbers overflow."""


UNDECODABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""What decoding strange bytes raises (a `UnicodeDecodeError` is a `ValueError`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """`ghoststep-run.json`: `ghoststep_run` is the version of the format; the first process that wrote gives the run its id."""

    ghoststep_run: int
    run_id: str = ""
    created_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    ghoststep_run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Number:
    number: int


_STEPS = msgspec.msgpack.Decoder(list[Step])
_NUMBERS = msgspec.msgpack.Decoder(list[_Number])
_GAP = msgspec.msgpack.Decoder(Gap)


def rank_folder(run_dir: Path, rank: int) -> Path:
    """Where this rank writes."""
    return run_dir / f"rank-{rank:05d}"


def segment_file(folder: Path, number: int) -> Path:
    """The segment of this number, from 1."""
    return folder / f"{number:06d}.seg"


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    with os.scandir(folder) as entries:
        for seen, entry in enumerate(entries):
            if seen >= MAX_ENTRIES:
                raise UnsafeInput(f"{folder.name} holds more than {MAX_ENTRIES} files: no run folder looks like that")
            if match := pattern.fullmatch(entry.name):
                found[int(match[1])] = folder / entry.name
    return dict(sorted(found.items()))


def rank_folders(run_dir: Path) -> dict[int, Path]:
    """Rank → its folder, by rank. Links to folders count: the ranks of several machines may be brought together so."""
    return {rank: folder for rank, folder in _numbered(run_dir, _RANK).items() if folder.is_dir()}


_BEING_LOADED: list[str] = []


@contextlib.contextmanager
def loading(setup: str) -> Iterator[None]:
    """While a setup's file is loaded: a training script that is not guarded trains then, and would go on with its own record."""
    _BEING_LOADED.append(setup)
    try:
        yield
    finally:
        _BEING_LOADED.remove(setup)


def refuse_while_loading(folder: Path) -> None:
    """`UsageError` if a setup is being loaded and this folder of a rank holds a record. A new folder is nobody's."""
    if _BEING_LOADED and (folder / MANIFEST).exists():
        raise UsageError(
            f"the record in run_dir={str(folder.parent)!r} is not continued while {_BEING_LOADED[-1]} is loaded as a setup: that file "
            "trains as it is imported. Put its training under `if __name__ == '__main__':`, or the setup function in a file of its own"
        )


def segments(folder: Path) -> dict[int, Path]:
    """Number → segment file of a rank, by number."""
    return _numbered(folder, _SEGMENT)


def read_bounded(path: Path, limit: int) -> bytes:
    """A small regular file. `OSError` when it cannot be read, `UnsafeInput` when it is larger than `limit`."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UnsafeInput(f"{path.name} is larger than {limit} bytes")
    return data


def read_header(run_dir: Path) -> RunHeader:
    """The header. `CannotLook` when it is damaged or of another version, `OSError` when there is none or it cannot be read."""
    data = read_bounded(run_dir / HEADER, MAX_HEADER_BYTES)
    try:
        version = msgspec.json.decode(data, type=_Version).ghoststep_run
        if version == FORMAT:
            return msgspec.json.decode(data, type=RunHeader)
    except UNDECODABLE as error:
        raise CannotLook(f"{HEADER} is damaged, or no header of a run: {error}") from error
    raise CannotLook(f"its format is version {version}, this ghoststep knows version {FORMAT}: update ghoststep to read it")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: written as words, which `read_manifest` takes for numbers again."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def encode_manifest(facts: RunFacts) -> bytes:
    """JSON. Decoded tokens are left out, the largest ids first, where they would make it longer than a reader accepts."""
    plain = _finite(plain_data(facts))
    data = msgspec.json.encode(plain)
    while len(data) > MAX_MANIFEST_BYTES and plain["tokens"]:
        kept = len(plain["tokens"]) // 2
        plain["tokens"] = dict(heapq.nsmallest(kept, plain["tokens"].items()))
        data = msgspec.json.encode(plain)
    return data


def read_manifest(folder: Path) -> RunFacts:
    """What a rank wrote about its run. `CannotLook` when it is missing or damaged."""
    try:
        return msgspec.json.decode(read_bounded(folder / MANIFEST, MAX_MANIFEST_BYTES), type=RunFacts, strict=False)
    except FileNotFoundError:
        raise CannotLook(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise CannotLook(f"{MANIFEST} cannot be read: {error.strerror or error}") from error
    except UNDECODABLE as error:
        raise CannotLook(f"{MANIFEST} is damaged: {error}") from error


def decode_steps(data: bytes) -> list[Step]:
    """Steps of a frame, numbers from 1 and rising; `ValueError` (or another of `UNDECODABLE`) when it holds something else."""
    steps = _STEPS.decode(data)
    last = 0
    for step in steps:
        if not last < step.number <= MAX_NUMBER:
            raise ValueError(f"step {step.number} after step {last}")
        last = step.number
    return steps


def decode_gap(data: bytes) -> Gap:
    """A gap of a frame; raises one of `UNDECODABLE` when it holds something else."""
    gap = _GAP.decode(data)
    if not 0 <= gap.after <= MAX_NUMBER:
        raise ValueError(f"a gap after step {gap.after}")
    return gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """How a rank's record ends: the last step known, whether the watch said goodbye, and the number of the last segment (0: none)."""

    last_number: int
    is_closed: bool
    last_segment: int


def read_tail(folder: Path) -> Tail:
    """The end of a rank's record. Cost: reads its last segment, an earlier one only if that one names no step.

    Steps that a reader would refuse for other reasons count too: their numbers are taken.
    """
    files = segments(folder)
    is_closed: bool | None = None
    number = 0
    for path in reversed(files.values()):
        kind = ""
        for frame in SegmentReader(path):
            kind = frame.kind
            number = max(number, _last_number(frame))
        is_closed = kind == CLOSED if is_closed is None else is_closed
        if number:
            break
    return Tail(last_number=number, is_closed=bool(is_closed), last_segment=max(files, default=0))


def _last_number(frame: Frame) -> int:
    try:
        if frame.kind == STEPS:
            return max((n.number for n in _NUMBERS.decode(frame.data) if n.number <= MAX_NUMBER), default=0)
        return decode_gap(frame.data).after if frame.kind == GAP else 0
    except UNDECODABLE:
        return 0
