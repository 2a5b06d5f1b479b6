"""The census as CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields

import ghoststep
from ghoststep.census.record import Record, RowCounts
from ghoststep.census.run import Census
from ghoststep.census.totals import Total, duplicates, tie_group, totals
from ghoststep.severity import SPIKE_NORM

_FORMULA_START = ("=", "+", "-", "@", "\t", "\r")
_COUNTS = tuple(f.name for f in fields(RowCounts))
COLUMNS = (
    "subject", "name", "revision", "status", "reason", "rows", "dims", "storage", "tied", "wiring", "multiplier",
    "median_norm", *(f"near_zero_{name}" for name in _COUNTS), *(f"zero_{name}" for name in _COUNTS), "nonfinite_rows",
    "template_hits", "identical_groups", "identical_rows", "fingerprint", "duplicate_of", "seconds", "bytes_read",
)  # fmt: skip
TOTAL_COLUMNS = tuple(f.name for f in fields(Total))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A record as JSON shows it, with the name of the checkpoint that counts for its table."""

    duplicate_of: str | None
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The JSON document, version 1. `norm_limit` is the effective norm under which a table row counts as near zero."""

    census: int
    ghoststep: str
    norm_limit: float
    asked: int
    interrupted: bool
    checkpoints: tuple[Line, ...]
    totals: tuple[Total, ...]


def to_json(census: Census) -> str:
    """Everything, with the totals. Enumerations by their text, "not measured" as null."""
    import msgspec

    names = duplicates(census.records)
    document = Document(
        census=1,
        ghoststep=ghoststep.__version__,
        norm_limit=SPIKE_NORM,
        asked=census.num_asked,
        interrupted=census.is_interrupted,
        checkpoints=tuple(Line(duplicate_of=n, record=r) for n, r in zip(names, census.records, strict=True)),
        totals=totals(census.records),
    )
    return msgspec.json.format(msgspec.json.encode(document)).decode() + "\n"


def to_csv(census: Census) -> str:
    """One line a checkpoint, header first; "not measured" is an empty cell.

    A text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    names = duplicates(census.records)
    return _csv(COLUMNS, [_cells(r, n) for r, n in zip(census.records, names, strict=True)])


def totals_to_csv(census: Census) -> str:
    """One line a cell of the totals, header first."""
    return _csv(TOTAL_COLUMNS, [[getattr(total, name) for name in TOTAL_COLUMNS] for total in totals(census.records)])


def _cells(record: Record, duplicate_of: str | None) -> list[object]:
    near, zero = ([getattr(c, name) if c else None for name in _COUNTS] for c in (record.near_zero, record.zero))
    return [
        record.subject,
        record.name,
        record.revision,
        record.status.value,
        record.reason,
        record.num_rows,
        record.num_dims,
        record.storage,
        tie_group(record.tie) if record.tie is not None else None,
        record.wiring.value if record.wiring is not None else None,
        record.multiplier,
        record.median_norm,
        *near,
        *zero,
        record.nonfinite_rows,
        record.template_hits,
        record.identical_groups,
        record.identical_rows,
        record.fingerprint,
        duplicate_of,
        record.seconds,
        record.bytes_read,
    ]


def _csv(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([[_cell(value) for value in line] for line in lines])
    return text.getvalue()


def _cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_START) else value
