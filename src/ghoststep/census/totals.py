"""Totals by wiring class and tie, over distinct tables: two repositories with one table count once.

The layout lets people compare with the census that is published: 291 repositories, 280 tables, 92 with near-zero rows of which
67 are reachable; tied 0 %, untied attention 30.9 %, untied gated 52.6 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ghoststep.census.record import Record, RowCounts
from ghoststep.evidence.wiring import Mixing, Tie

ALL = "all"
UNKNOWN = "unknown"
_WIRINGS = (*(m.value for m in (Mixing.ATTENTION, Mixing.ATTENTION_BESIDE, Mixing.RECURRENT_GATED)), UNKNOWN)
_TIES = ("tied", "untied", "broken tie", "no head", UNKNOWN)
_NONE = RowCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """One cell, or a sum of cells (`wiring` or `tie` "all").

    `checkpoints` were read; all other numbers count distinct tables. `near_zero_raw`: with any near-zero row;
    `near_zero_reachable`: with one that is fed; `near_zero_open`: with none that is known to be fed but some that might be.
    `zero_*` likewise for exact zeros; `either_reachable`: near zero or zero. Shares are per cent of `tables` (None without any).
    """

    wiring: str
    tie: str
    checkpoints: int
    tables: int
    near_zero_raw: int
    near_zero_reachable: int
    near_zero_open: int
    zero_raw: int
    zero_reachable: int
    zero_open: int
    either_reachable: int
    near_zero_reachable_percent: float | None
    either_reachable_percent: float | None


def tie_group(tie: Tie | None) -> str:
    """The column of the totals: "tied", "untied", "broken tie", "no head" or "unknown"."""
    named: Mapping[Tie | None, str] = {Tie.TIED: "tied", Tie.UNTIED: "untied", Tie.NO_HEAD: "no head", None: UNKNOWN}
    return named.get(tie, "broken tie")


def representatives(records: Sequence[Record]) -> Mapping[str, Record]:
    """Fingerprint → the record that stands for this table: the first whose counts are all known, else the first."""
    chosen: dict[str, Record] = {}
    for record in records:
        if record.fingerprint is None:
            continue
        present = chosen.get(record.fingerprint)
        if present is None or (_has_unknown(present) and not _has_unknown(record)):
            chosen[record.fingerprint] = record
    return chosen


def duplicates(records: Sequence[Record]) -> tuple[str | None, ...]:
    """For each record the name of the one that has the same table and counts in its place, else None."""
    chosen = representatives(records)
    stands = [chosen.get(r.fingerprint) if r.fingerprint is not None else None for r in records]
    return tuple(s.name if s is not None and s is not r else None for r, s in zip(records, stands, strict=True))


def totals(records: Sequence[Record]) -> tuple[Total, ...]:
    """Every cell that holds a checkpoint, then all wirings by tie, then everything. A table counts where it stands first."""
    read = [r for r in records if r.was_read]
    tables = list(representatives(read).values())
    ties = [tie for tie in _TIES if any(tie_group(r.tie) == tie for r in read)]
    cells = [(wiring, tie) for wiring in _WIRINGS for tie in _TIES]
    found = [_total(wiring, tie, read, tables) for wiring, tie in [*cells, *((ALL, tie) for tie in ties), (ALL, ALL)]]
    return tuple(total for total in found if total.checkpoints or (total.wiring, total.tie) == (ALL, ALL))


def _total(wiring: str, tie: str, read: Sequence[Record], tables: Sequence[Record]) -> Total:
    def is_here(record: Record) -> bool:
        own = record.wiring.value if record.wiring is not None else UNKNOWN
        return wiring in (ALL, own) and tie in (ALL, tie_group(record.tie))

    here = [r for r in tables if is_here(r)]
    near, zero = [r.near_zero or _NONE for r in here], [r.zero or _NONE for r in here]
    near_reachable = sum(counts.reachable > 0 for counts in near)
    either_reachable = sum(r.num_reachable > 0 for r in here)
    return Total(
        wiring=wiring,
        tie=tie,
        checkpoints=sum(map(is_here, read)),
        tables=len(here),
        near_zero_raw=sum(counts.raw > 0 for counts in near),
        near_zero_reachable=near_reachable,
        near_zero_open=sum(counts.is_open for counts in near),
        zero_raw=sum(counts.raw > 0 for counts in zero),
        zero_reachable=sum(counts.reachable > 0 for counts in zero),
        zero_open=sum(counts.is_open for counts in zero),
        either_reachable=either_reachable,
        near_zero_reachable_percent=_percent(near_reachable, len(here)),
        either_reachable_percent=_percent(either_reachable, len(here)),
    )


def _percent(part: int, whole: int) -> float | None:
    return round(100 * part / whole, 1) if whole else None


def _has_unknown(record: Record) -> bool:
    return any(counts is not None and counts.unknown > 0 for counts in (record.near_zero, record.zero))
