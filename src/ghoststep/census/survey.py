"""One checkpoint → one `Record`. Each fact is collected once, through `engine.Case`; arrays die with the case."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ghoststep.census.record import Example, Record, RowCounts, Status
from ghoststep.census.watched import Watched
from ghoststep.engine import Case
from ghoststep.evidence.base import Evidence, Missing
from ghoststep.evidence.checkpoint import Declared, Tables
from ghoststep.evidence.rows import InputRows, RowFacts
from ghoststep.evidence.tokenizer import SuspectReach, TemplateTokens, Vocabulary
from ghoststep.evidence.wiring import MixingClass, TieState
from ghoststep.finding import Outcome
from ghoststep.severity import SPIKE_NORM, Exposure, TokenExposure, exposures, padding_ids
from ghoststep.text import visible

if TYPE_CHECKING:
    from ghoststep.registry import Instrument
    from ghoststep.subjects.base import Source
    from ghoststep.subjects.checkpoint import Checkpoint

MAX_EXAMPLES = 3
MAX_TEXT = 400
FED = (Exposure.TEMPLATE, Exposure.ROLE, Exposure.TEXT)
"""Exposures that count as reachable; `severity.exposures` decides which one a token has."""

_Fact = TypeVar("_Fact", bound=Evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A subject that could be opened. `key` is the same as long as its content is."""

    checkpoint: Checkpoint
    watched: Watched
    subject: str
    name: str
    revision: str | None
    key: str


def open_watched(
    subject: str, *, offline: bool, timeout_seconds: float | None, started: float, stop: threading.Event
) -> Opened:
    """Open one subject; raises what `open_checkpoint` raises. Cost: a folder listing, or three requests to a Hub."""
    from ghoststep.subjects.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(subject, offline=offline)
    source = checkpoint.source
    revision: str | None = getattr(source, "sha", None)
    watched = Watched(source, timeout_seconds=timeout_seconds, started=started, stop=stop)
    checkpoint.source = watched  # before the first question about tensors: every byte now goes through the watch
    return Opened(
        checkpoint=checkpoint,
        watched=watched,
        subject=visible(subject),
        name=visible(subject if revision is None else f"hf:{source.name}"),
        revision=revision,
        key=_local_key(subject, source) if revision is None else f"{subject.partition('@')[0]}@{revision}",
    )


def _local_key(subject: str, source: Source) -> str:
    """Path, and names, sizes and times of all its files: a new tokenizer changes the answer as much as new weights do."""
    digest = hashlib.blake2b(digest_size=16)
    root = getattr(source, "root", None)
    for file in source.files():
        status = os.stat(os.path.join(root, file)) if root is not None else None
        stamp = (file, status.st_size, status.st_mtime_ns) if status is not None else (file, source.size(file))
        digest.update(os.fsencode(repr(stamp)))
    return f"{visible(os.path.realpath(os.path.expanduser(subject)))}#{digest.hexdigest()}"


def survey(opened: Opened, instruments: Sequence[Instrument]) -> Record:
    """Measure one checkpoint. Never raises for a defect of the checkpoint: the record's reason says what is wrong.

    Cost: the headers, the config and the input table (and the output table as far as needed to tell whether the two are
    tied); the tokenizer only where a row is near zero or zero. Memory: one table's per-row arrays.
    """
    case = Case([opened.checkpoint], instruments, timeout_seconds=opened.watched.remaining_seconds)
    base = Record(subject=opened.subject, name=opened.name, revision=opened.revision, status=Status.FAILED)
    tables = _fact(case, Tables)
    if isinstance(tables, Tables):
        table = tables.input
        base = replace(base, num_rows=table.num_rows, num_dims=table.num_dims, storage=visible(table.tensor.dtype))
    inputs = _fact(case, InputRows)
    if isinstance(inputs, Missing):
        record = replace(base, reason=_shorten(inputs.reason), retry=_is_transient(opened, [inputs]))
    else:
        record = _measured(case, opened, base, inputs)
    return replace(record, bytes_read=opened.watched.bytes_read)


def _measured(case: Case, opened: Opened, base: Record, inputs: InputRows) -> Record:
    rows = inputs.rows
    mixing, tie = _fact(case, MixingClass), _fact(case, TieState)
    gaps = [(what, fact) for what, fact in (("wiring", mixing), ("tie", tie)) if isinstance(fact, Missing)]
    norms_R = rows.norms_R * inputs.multiplier
    near = [int(i) for i in ((norms_R < SPIKE_NORM) & (norms_R > 0)).nonzero()[0]]
    zero = [int(i) for i in rows.zero_R.nonzero()[0]]
    feeding = _feeding(case, bool(near or zero))
    if feeding.gap is not None and any(feeding.is_unknown(i) for i in (*near, *zero)):
        gaps.append(("reachability", feeding.gap))
    if feeding.template_gap is not None:
        gaps.append(("chat template", feeding.template_gap))
    fed = [feeding.by_row[i] for i in (*zero, *near) if i in feeding.by_row and feeding.by_row[i].exposure in FED]
    worst = sorted(fed, key=lambda e: (float(norms_R[e.table_row]), e.table_row))[:MAX_EXAMPLES]
    hits = sum(e.exposure is Exposure.TEMPLATE for e in fed)
    return replace(
        base,
        status=Status.PARTIAL if gaps else Status.OK,
        reason=_shorten("; ".join(f"{what}: {gap.reason}" for what, gap in gaps)) if gaps else None,
        retry=_is_transient(opened, [gap for _, gap in gaps]),
        storage=rows.storage,
        tie=None if isinstance(tie, Missing) else tie.tie,
        wiring=None if isinstance(mixing, Missing) else mixing.mixing,
        multiplier=inputs.multiplier,
        median_norm=rows.median_norm if rows.median_norm == rows.median_norm else None,
        near_zero=feeding.count(near),
        zero=feeding.count(zero),
        nonfinite_rows=int(rows.nonfinite_R.sum()),
        template_hits=None if feeding.template_gap is not None else hits,
        identical_groups=len(rows.identical_groups),
        identical_rows=sum(map(len, rows.identical_groups)),
        examples=tuple(_example(e, float(norms_R[e.table_row])) for e in worst),
        fingerprint=fingerprint(rows),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Feeding:
    """What feeds the suspicious rows. `asked` holds the rows that the tokenizer was asked about; gaps say why it was not."""

    by_row: Mapping[int, TokenExposure]
    asked: frozenset[int]
    padding: frozenset[int]
    gap: Missing | None = None
    template_gap: Missing | None = None

    def is_unknown(self, table_row: int) -> bool:
        return table_row not in self.asked and table_row not in self.padding

    def count(self, table_rows: Sequence[int]) -> RowCounts:
        kinds = [self._kind(i) for i in table_rows]
        return RowCounts(
            raw=len(kinds),
            reachable=sum(kind in FED for kind in kinds),
            undetermined=kinds.count(Exposure.UNDETERMINED) + kinds.count(Exposure.UNRENDERED),
            reserved=kinds.count(Exposure.RESERVED),
            unreachable=kinds.count(Exposure.NONE),
            no_token=kinds.count("no token"),
            unknown=kinds.count("unknown"),
        )

    def _kind(self, table_row: int) -> Exposure | str:
        if self.is_unknown(table_row):
            return "unknown"
        if table_row not in self.asked:
            return Exposure.NONE  # named as padding by the config: that much is known without a tokenizer
        found = self.by_row.get(table_row)
        return "no token" if found is None else found.exposure


def _feeding(case: Case, is_needed: bool) -> _Feeding:
    """Ask the tokenizer, but only where a row is suspicious: most checkpoints of a fleet need no tokenizer at all."""
    if not is_needed:
        return _Feeding(by_row={}, asked=frozenset(), padding=frozenset())
    reach, template = _fact(case, SuspectReach), _fact(case, TemplateTokens)
    vocabulary, declared = _fact(case, Vocabulary), _fact(case, Declared)
    padding = padding_ids(vocabulary, declared)
    no_template = isinstance(template, Missing) and template.outcome is not Outcome.NOT_APPLICABLE
    template_gap = template if isinstance(template, Missing) and no_template else None
    if isinstance(reach, Missing):
        return _Feeding(by_row={}, asked=frozenset(), padding=padding, gap=reach, template_gap=template_gap)
    return _Feeding(
        by_row=exposures(reach, template, vocabulary, declared),
        asked=frozenset(reach.reach),
        padding=padding,
        gap=Missing(reason="the tokenizer was not asked about every near-zero table row (the whole table is tiny)"),
        template_gap=template_gap,
    )


def fingerprint(rows: RowFacts) -> str:
    """Hexadecimal digest of shape, storage and the bits of every float64 norm: equal for a copy, whatever files it lies in."""
    shape = f"{rows.table.num_rows}x{rows.table.num_dims}:{rows.storage}:"
    digest = hashlib.sha256(shape.encode())
    digest.update(rows.norms_R.astype("<f8", copy=False).tobytes())
    return digest.hexdigest()[:32]


def failure(subject: str, reason: str, *, retry: bool = True) -> Record:
    """The record of a subject that could not be opened."""
    return Record(subject=visible(subject), name=visible(subject), status=Status.FAILED, reason=_shorten(reason), retry=retry)


def timed(record: Record, started: float) -> Record:
    """With the seconds since `started` (of `time.monotonic`)."""
    return replace(record, seconds=round(time.monotonic() - started, 3))


def _fact(case: Case, kind: type[_Fact]) -> _Fact | Missing:
    value = case.fact(kind)
    assert isinstance(value, kind | Missing)
    return value


def _is_transient(opened: Opened, gaps: Iterable[Missing]) -> bool:
    return any(True for _ in gaps) and (opened.watched.was_cut_short or opened.watched.remaining_seconds == 0.0)


def _example(exposure: TokenExposure, norm: float) -> Example:
    token = visible(exposure.token)[:MAX_TEXT]
    return Example(table_row=exposure.table_row, token=token, norm=norm, fed_by=exposure.exposure.value)


def _shorten(reason: str) -> str:
    text = visible(" ".join(reason.split()))
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
