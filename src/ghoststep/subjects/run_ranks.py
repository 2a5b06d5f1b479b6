"""One rank's record, read from its folder: the last steps of it, what is missing in between, and what cannot be read.

Memory is bounded by steps and by their estimated size, whatever the files hold. Segments are read from the last one backwards, so that
a run of months costs no more than its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from ghoststep.errors import CannotLook
from ghoststep.evidence.steps import Gap, RankRecord, RunFacts, Step
from ghoststep.run_folder import UNDECODABLE, decode_gap, decode_steps, read_manifest, segments
from ghoststep.run_frames import CLOSED, EVENT, GAP, STEPS, Damage, Frame, SegmentReader
from ghoststep.text import visible

MAX_STEPS = 200_000
"""Of one rank."""

MAX_RUN_BYTES = 1 << 30
"""Of all ranks together, as `_cost` estimates what their steps take in memory."""

MAX_GAPS = 200
MAX_BROKEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something that happened besides steps. `payload`: whatever the writer gave, from a file of a stranger."""

    kind: str
    at: float
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _EventKind:
    kind: str
    payload: msgspec.Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class _Broken:
    hook: str
    reason: str


_EVENT = msgspec.msgpack.Decoder(RunEvent)
_EVENT_KIND = msgspec.msgpack.Decoder(_EventKind)
_BROKEN = msgspec.msgpack.Decoder(_Broken)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading:
    """A rank's record; what failed in the watch itself; what is wrong with the files; True where older steps were left out."""

    record: RankRecord
    broken: tuple[str, ...]
    complaints: tuple[str, ...]
    has_more: bool


@dataclass(slots=True, kw_only=True)
class _Part:
    """What one segment holds, in the order of the file. Items: a step, a gap, or a reason why something is missing here."""

    number: int
    items: deque[Step | Gap | str] = field(default_factory=deque)
    broken: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_bytes: int = 0
    was_cut: bool = False
    is_closed: bool = False
    damage: Damage | None = None


def read_rank(folder: Path, rank: int, *, max_steps: int = MAX_STEPS, max_bytes: int = MAX_RUN_BYTES) -> RankReading:
    """The last steps of a rank. Never raises for what its files hold; `complaints` say what was wrong with them.

    Works while the rank writes: what is read is a prefix of what is written.
    """
    complaints: list[str] = []
    facts = _facts(folder, rank, complaints)
    try:
        files = segments(folder)
    except (OSError, CannotLook) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        complaints.append(f"{folder.name} cannot be listed: {visible(why)}")
        files = {}
    parts: deque[_Part] = deque()
    has_more = False
    for number, path in reversed(files.items()):
        part = _read_segment(path, number, max_steps, max_bytes)
        parts.appendleft(part)
        max_steps, max_bytes = max_steps - part.num_steps, max_bytes - part.num_bytes
        has_more = part.was_cut or (number > min(files) and (max_steps <= 0 or max_bytes <= 0))
        if has_more:
            break
    steps, gaps = _joined(parts, has_more=has_more)
    for part in parts:
        if part.damage is not None and not part.damage.is_torn:  # half a frame at the end is what a kill leaves
            complaints.append(f"{folder.name}/{part.number:06d}.seg is damaged at byte {part.damage.at}: {part.damage.reason}")
    is_closed = bool(parts) and parts[-1].is_closed
    broken = dict.fromkeys(line for part in parts for line in part.broken)
    return RankReading(
        record=RankRecord(facts=facts, steps=steps, gaps=gaps, is_closed=is_closed),
        broken=tuple(broken)[:MAX_BROKEN],
        complaints=tuple(complaints),
        has_more=has_more,
    )


def read_events(folder: Path) -> Iterator[RunEvent]:
    """Every readable event of a rank, oldest first. Memory: one frame."""
    for path in segments(folder).values():
        for frame in SegmentReader(path):
            if frame.kind == EVENT:
                try:
                    yield _EVENT.decode(frame.data)
                except UNDECODABLE:
                    continue


def _facts(folder: Path, rank: int, complaints: list[str]) -> RunFacts:
    """The manifest, or only the rank where there is none: steps say much without it."""
    try:
        facts = read_manifest(folder)
    except CannotLook as error:
        complaints.append(visible(f"{folder.name}/{error}"))
        return RunFacts(rank=rank)
    if facts.rank != rank:
        complaints.append(f"{folder.name}/manifest.json is that of rank {facts.rank}")
    return replace(facts, rank=rank)


def _read_segment(path: Path, number: int, max_steps: int, max_bytes: int) -> _Part:
    part = _Part(number=number)
    costs: deque[int] = deque()
    reader = SegmentReader(path)
    for frame in reader:
        part.is_closed = frame.kind == CLOSED
        for item in _items(frame, part):
            cost = _cost(item)
            part.items.append(item)
            costs.append(cost)
            part.num_bytes += cost
            part.num_steps += isinstance(item, Step)
            while part.num_steps > max_steps or part.num_bytes > max_bytes:
                part.num_steps -= isinstance(part.items.popleft(), Step)
                part.num_bytes -= costs.popleft()
                part.was_cut = True
    part.damage = reader.damage
    if reader.damage is not None:
        part.is_closed = False
    return part


def _items(frame: Frame, part: _Part) -> list[Step] | list[Gap] | list[str]:
    try:
        if frame.kind == STEPS:
            return decode_steps(frame.data)
        if frame.kind == GAP:
            gap = decode_gap(frame.data)
            return [replace(gap, reason=visible(gap.reason[:500]))]
        if frame.kind == EVENT and len(part.broken) < MAX_BROKEN:
            event = _EVENT_KIND.decode(frame.data)
            if event.kind == "broken":
                said = _BROKEN.decode(event.payload)
                part.broken.append(visible(f"{said.hook[:100]}: {said.reason[:500]}"))
    except UNDECODABLE as error:
        return [
            f"{part.number:06d}.seg holds at byte {frame.at} a frame of {frame.kind!r:.30} that is none: {visible(str(error)[:200])}"
        ]
    return []


def _cost(item: Step | Gap | str) -> int:
    """About what a step takes in memory, in bytes; strings at their widest."""
    if not isinstance(item, Step):
        return 2500
    cost = 1000 + len(item.norms) + 32 * len(item.lrs) + 4 * len(item.clip_action)
    for row in item.rows:
        cost += 300 + 4 * len(row.table)
    for outlier in item.outliers:
        cost += 200 + 4 * len(outlier.parameter)
    for name in (*item.nonfinite_before, *item.nonfinite_after):
        cost += 80 + 4 * len(name)
    return cost


class _Joiner:
    """Puts parts together: steps by rising number, and a gap wherever some are missing."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.gaps: list[Gap] = []
        self.last = 0
        self._num_more = self._num_double = 0

    def gap(self, reason: str, after: int | None = None) -> None:
        """Steps are missing here, or after another step; only the first `MAX_GAPS` are kept, the others counted."""
        if len(self.gaps) < MAX_GAPS:
            self.gaps.append(Gap(after=self.last if after is None else after, reason=reason))
        else:
            self._num_more += 1

    def step(self, step: Step) -> None:
        """The next step of the file; one whose number was there already is left out."""
        if step.number <= self.last:
            self._num_double += 1
            return
        if step.number > self.last + 1 and not (self.gaps and self.gaps[-1].after == self.last):
            self.gap(f"steps {self.last + 1} to {step.number - 1} are not in the record")
        self.last = step.number
        self.steps.append(step)

    def finish(self) -> tuple[tuple[Step, ...], tuple[Gap, ...]]:
        """Steps and gaps, both by number."""
        gaps = self.gaps
        if self._num_double:
            gaps.append(
                Gap(after=self.last, reason=f"{self._num_double} steps were left out: their numbers had been there before")
            )
        if self._num_more:
            gaps.append(Gap(after=self.last, reason=f"and {self._num_more} gaps more"))
        return tuple(self.steps), tuple(sorted(gaps, key=lambda g: g.after))


def _joined(parts: deque[_Part], *, has_more: bool) -> tuple[tuple[Step, ...], tuple[Gap, ...]]:
    joiner = _Joiner()
    if has_more:
        joiner.gap(f"older steps are in the record and were not read: only the last {sum(p.num_steps for p in parts)} are")
    before = parts[0].number - 1 if parts and has_more else 0
    for part in parts:
        if part.number > before + 1:
            joiner.gap(f"{part.number - 1:06d}.seg is missing")
        before = part.number
        for item in part.items:
            if isinstance(item, Step):
                joiner.step(item)
            elif isinstance(item, Gap):
                joiner.gap(item.reason, max(item.after, joiner.last) if joiner.steps else item.after)
            else:
                joiner.gap(item)
        if part.damage is not None and not part.damage.is_torn:
            joiner.gap(
                f"{part.number:06d}.seg is damaged at byte {part.damage.at}: {part.damage.reason}; what follows there is lost"
            )
    return joiner.finish()
