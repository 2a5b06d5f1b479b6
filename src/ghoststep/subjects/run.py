"""A recorded run as a subject: a folder that `ghoststep.watch(run_dir=...)` wrote, or is writing now."""

from __future__ import annotations

import datetime
import itertools
import os
import re
import shlex
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ghoststep.errors import CannotLook, SubjectError
from ghoststep.evidence.steps import Gap, RankRecord, RunRecord
from ghoststep.finding import SubjectInfo
from ghoststep.run_folder import HEADER, MANIFEST, rank_folder, rank_folders, read_header
from ghoststep.subjects.run_ranks import MAX_RUN_BYTES, MAX_STEPS, RankReading, RunEvent, read_events, read_rank
from ghoststep.text import counted, visible

MAX_RANKS = 1024
MAX_LOOKED_AT = 1000
"""Entries of a folder in which runs are looked for, to name them in an error."""

_RANK_NAME = re.compile(r"rank-[0-9]{5,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReading:
    """All ranks that were read, and what is wrong with the folder or was left out."""

    ranks: tuple[RankReading, ...]
    complaints: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        """Steps read, of all ranks."""
        return sum(len(r.record.steps) for r in self.ranks)


class Run:
    """A run folder. Its files are read on the first question and kept; a run that goes on is seen as it was then. Threads may ask.

    after: rank → number of the last step that is left out, where only what a process added is asked for.

    Memory: at most the last 200,000 steps of a rank and about 1 GiB in all; where more is there, it is said.
    """

    kind = "run"

    def __init__(self, folder: Path, *, name: str | None = None, after: Mapping[int, int] | None = None) -> None:
        self.folder = folder
        self._after = after or {}
        self.name = name if name is not None else str(folder)
        self._lock = threading.Lock()
        self._reading: RunReading | None = None
        self._failure: str | None = None

    def info(self) -> SubjectInfo:
        """Model, ranks, steps, dates, how it ended, and what of it cannot be read. Cost: reads the record, once."""
        try:
            reading = self.read()
        except CannotLook as failure:
            return SubjectInfo(kind=self.kind, name=self.name, facts={"unreadable": str(failure)})
        records = [r.record for r in reading.ranks]
        facts: dict[str, str | int | float | bool] = {}
        if model := next((r.facts.model for r in records if r.facts.model), ""):
            facts["model"] = visible(model[:200])
        facts["ranks"] = len(records)
        if (world := max(r.facts.world_size for r in records)) > len(records):
            facts["ranks_missing"] = world - len(records)
        facts["steps"] = _step_range(records)
        if dates := _dates(records):
            facts["recorded"] = dates
        facts["ended"] = "closed" if all(r.is_closed for r in records) else "killed, crashed or still running"
        if earlier := max(self._after.values(), default=0):
            facts["earlier"] = f"the steps up to {earlier} are not judged here: `ghoststep check` on the folder judges all"
        if gaps := sum(len(r.gaps) for r in records):
            facts["gaps"] = gaps
        if any(r.has_more for r in reading.ranks):
            facts["read"] = f"only the last {max(len(r.steps) for r in records)} steps a rank"
        if reading.complaints:
            more = f" (and {len(reading.complaints) - 3} more)" if len(reading.complaints) > 3 else ""
            facts["damaged"] = "; ".join(reading.complaints[:3]) + more
        return SubjectInfo(kind=self.kind, name=self.name, facts=facts)

    @property
    def unreadable(self) -> str | None:
        """Why the record cannot be read at all, None if it can."""
        try:
            self.read()
        except CannotLook as failure:
            return str(failure)
        return None

    def read(self) -> RunReading:
        """Everything that can be read. `CannotLook` when there is no step in it: nothing can be judged then."""
        with self._lock:
            if self._failure is not None:
                raise CannotLook(self._failure)
            if self._reading is None:
                try:
                    self._reading = _read(self.folder, self.name, self._after)
                except CannotLook as failure:
                    self._failure = str(failure)
                    raise
            return self._reading

    def record(self) -> RunRecord:
        """The steps of all ranks, as checks take them. `CannotLook` as in `read`."""
        reading = self.read()
        broken = dict.fromkeys(line for rank in reading.ranks for line in rank.broken)
        return RunRecord(ranks=tuple(r.record for r in reading.ranks), broken=tuple(broken))

    def events(self, rank: int = 0) -> Iterator[RunEvent]:
        """Every event of a rank: findings told live, what the policy did, hooks that broke."""
        return read_events(rank_folder(self.folder, rank))


def is_run_folder(path: Path) -> bool:
    """True for a folder that holds a run's header, or the first rank's manifest where the header was lost."""
    try:
        return (path / HEADER).is_file() or (rank_folder(path, 0) / MANIFEST).is_file()
    except (OSError, ValueError):
        return False


def run_around(spec: str) -> str:
    """What to write instead of one rank's folder, whose kept batches would pass for a checkpoint; "" for any other."""
    if not _RANK_NAME.fullmatch(Path(spec).name):
        return ""
    above = Path(spec).expanduser().resolve().parent
    return f"{visible(spec)} is one rank's part of a run: name the run, {_command(above)}." if is_run_folder(above) else ""


def runs_inside(spec: str) -> str:
    """What to write instead of a folder of run folders; "" where none is inside. Looks at `MAX_LOOKED_AT` entries at most."""
    folder = Path(spec).expanduser()
    if not folder.is_dir():
        return ""
    try:
        with os.scandir(folder) as entries:
            seen = list(itertools.islice(entries, MAX_LOOKED_AT))
    except OSError:
        return ""
    runs = sorted(e.name for e in seen if not e.name.startswith(".") and is_run_folder(folder / e.name))
    if not runs:
        return ""
    most = "at least " if len(seen) == MAX_LOOKED_AT else ""
    some = ", ".join(visible(n) for n in runs[:3]) + (", ..." if len(runs) > 3 else "")
    inside = f"{most}{counted(len(runs), 'run is', 'runs are')} inside ({some})"
    return f"{visible(spec)} is no run itself; {inside}: name one, {_command(Path(spec) / runs[0])}."


def _command(folder: Path) -> str:
    """What to type. A name that cannot be shown as it is would not be found if it were copied from here."""
    name = shlex.quote(str(folder))
    return f"`ghoststep check {name}`" if name.isprintable() else f"`ghoststep check` and {visible(name)} (escaped here)"


def open_run(spec: str) -> Run:
    """Open a run folder. `SubjectError` when a newer ghoststep wrote it or its header is damaged beyond reading."""
    folder = Path(spec).expanduser()
    try:
        read_header(folder)
    except FileNotFoundError:
        pass  # the ranks say enough; `read` tells
    except (CannotLook, OSError) as error:
        raise SubjectError(f"{spec} is a run folder that cannot be opened: {visible(str(error))}.") from error
    return Run(folder, name=spec)


def _since(rank: RankReading, number: int) -> RankReading:
    """Without the steps up to this number. What comes after begins anew, as after any gap."""
    if not number:
        return rank
    steps = tuple(s for s in rank.record.steps if s.number > number)
    gaps = tuple(g for g in rank.record.gaps if g.after >= number)
    if not any(g.after == number for g in gaps):
        gaps = (Gap(after=number, reason="earlier steps are left out"), *gaps)
    return replace(rank, record=replace(rank.record, steps=steps, gaps=gaps))


def _read(folder: Path, name: str, after: Mapping[int, int]) -> RunReading:
    complaints = [] if (folder / HEADER).exists() else [f"{HEADER} is missing"]
    try:
        folders = rank_folders(folder)
    except OSError as error:
        raise CannotLook(f"{name} cannot be listed: {error.strerror or error}") from error
    if not folders:
        raise CannotLook(f"{name} holds no rank: the process ended before it recorded anything. Start the run again.")
    if len(folders) > MAX_RANKS:
        complaints.append(f"only the first {MAX_RANKS} of {len(folders)} ranks were read")
    chosen = list(folders.items())[:MAX_RANKS]
    share = MAX_RUN_BYTES // len(chosen)
    ranks = [read_rank(path, rank, max_steps=MAX_STEPS, max_bytes=share) for rank, path in chosen]
    complaints += [complaint for rank in ranks for complaint in rank.complaints]
    ranks = [_since(r, after.get(r.record.facts.rank, 0)) for r in ranks]
    if not any(r.record.steps for r in ranks):
        said = "; ".join(complaints)  # a damaged segment is a complaint and a gap: it is named once
        gaps = [g.reason for r in ranks for g in r.record.gaps if g.reason.split("; ")[0] not in said]
        why = "; ".join([*complaints, *gaps][:3]) or "the process ended before its first flush"
        raise CannotLook(f"{name} holds no step that can be read: {why}.")
    return RunReading(ranks=tuple(ranks), complaints=tuple(complaints))


def _step_range(records: list[RankRecord]) -> str:
    numbers = [n for r in records if r.steps for n in (r.steps[0].number, r.steps[-1].number)]
    return f"{min(numbers)} to {max(numbers)}"


def _dates(records: list[RankRecord]) -> str:
    """Begin and end in UTC; "" where the numbers are no times."""
    begins = [r.facts.started_at or r.steps[0].ended_at for r in records if r.steps]
    ends = [r.steps[-1].ended_at for r in records if r.steps]
    try:
        first, last = (datetime.datetime.fromtimestamp(t, datetime.timezone.utc) for t in (min(begins), max(ends)))
    except (ValueError, OverflowError, OSError):  # NaN, infinite, far outside the calendar
        return ""
    return f"{first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC"
