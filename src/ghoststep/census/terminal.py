"""The census for people: one line a checkpoint, the worst table rows, and the totals."""

from __future__ import annotations

from collections.abc import Sequence

from ghoststep.census.record import Record, RowCounts, Status
from ghoststep.census.run import Census
from ghoststep.census.totals import duplicates, tie_group, totals
from ghoststep.evidence.wiring import Mixing
from ghoststep.severity import SPIKE_NORM

MAX_NAME = 60
MAX_TOKEN = 32
MAX_LISTED = 20
_SHORT_WIRING = {Mixing.RECURRENT_GATED.value: "gated", Mixing.ATTENTION_BESIDE.value: "gated + attention"}
_HEADER = ("checkpoint", "table rows x dims", "storage", "tied", "wiring", "near zero", "exact zero", "in template",
           "identical", "seconds", "read", "status")  # fmt: skip
_TOTALS_HEADER = ("wiring", "tied", "checkpoints", "tables", "near zero", "exact zero", "near zero %", "either %")


def to_terminal(census: Census) -> str:
    """Aligned columns. "3 → 1" reads: 3 table rows, 1 of them reachable; "+2?" are undetermined or could not be asked."""
    names = duplicates(census.records)
    read = sum(record.was_read for record in census.records)
    failed = len(census.records) - read
    lines = _aligned([_HEADER, *(_cells(r, n) for r, n in zip(census.records, names, strict=True))])
    lines += _worst_lines(census.records)
    if read:
        lines += ["", f"Totals, near zero = effective norm under {SPIKE_NORM:g}, tables counted once by content:"]
        lines += _aligned([_TOTALS_HEADER, *_total_lines(census.records)])
    missing = census.num_asked - len(census.records)
    partial = sum(record.status is Status.PARTIAL for record in census.records)
    lines += ["", f"{census.num_asked} checkpoints: {read} read ({partial} of them partially), {failed} could not be read"
              + (f", {missing} not reached before the interrupt" if missing else "") + "."]  # fmt: skip
    return "\n".join(lines) + "\n"


def _cells(record: Record, duplicate_of: str | None) -> tuple[str, ...]:
    status = record.status.value if record.reason is None else f"{record.status.value}: {record.reason}"
    if duplicate_of is not None:
        status += f" (same table as {_short_name(duplicate_of)})"
    shape = f"{record.num_rows} x {record.num_dims}" if record.num_rows is not None else "-"
    if not record.was_read:
        unmeasured = ("-",) * 6
        return (_short_name(record.name), shape, record.storage or "-", *unmeasured, *_cost(record), status)
    return (
        _short_name(record.name),
        shape,
        record.storage or "-",
        tie_group(record.tie) if record.tie is not None else "?",
        _wiring(record.wiring.value) if record.wiring is not None else "?",
        _arrow(record.near_zero),
        _arrow(record.zero),
        "?" if record.template_hits is None else str(record.template_hits),
        f"{record.identical_rows} in {record.identical_groups}" if record.identical_groups else "0",
        *_cost(record),
        status,
    )


def _cost(record: Record) -> tuple[str, str]:
    return f"{record.seconds:.1f}", f"{record.bytes_read / 1e6:.1f} MB"


def _wiring(wiring: str) -> str:
    return _SHORT_WIRING.get(wiring, wiring)


def _arrow(counts: RowCounts | None) -> str:
    if counts is None:
        return "-"
    maybe = counts.undetermined + counts.unknown
    return "0" if counts.raw == 0 else f"{counts.raw} → {counts.reachable}" + (f" +{maybe}?" if maybe else "")


def _worst_lines(records: Sequence[Record]) -> list[str]:
    hit = [record for record in records if record.num_reachable]
    if not hit:
        return []
    lines = ["", "Reachable near-zero and zero table rows (the smallest of each; `ghoststep check NAME` lists them all):"]
    for record in hit[:MAX_LISTED]:
        shown = "; ".join(
            f"'{e.token[:MAX_TOKEN]}' table row {e.table_row}, norm {e.norm:.3g}, {e.fed_by}" for e in record.examples
        )
        more = record.num_reachable - len(record.examples)
        lines.append(f"  {_short_name(record.name)}: {shown}" + (f"; {more} more" if more > 0 else ""))
    if len(hit) > MAX_LISTED:
        lines.append(f"  ... and {len(hit) - MAX_LISTED} more checkpoints; `--format json` has them all")
    return lines


def _total_lines(records: Sequence[Record]) -> list[tuple[str, ...]]:
    return [
        (
            _wiring(t.wiring),
            t.tie,
            str(t.checkpoints),
            str(t.tables),
            f"{t.near_zero_raw} → {t.near_zero_reachable}" + (f" +{t.near_zero_open}?" if t.near_zero_open else ""),
            f"{t.zero_raw} → {t.zero_reachable}" + (f" +{t.zero_open}?" if t.zero_open else ""),
            "-" if t.near_zero_reachable_percent is None else f"{t.near_zero_reachable_percent:.1f}",
            "-" if t.either_reachable_percent is None else f"{t.either_reachable_percent:.1f}",
        )
        for t in totals(records)
    ]


def _short_name(name: str) -> str:
    return name if len(name) <= MAX_NAME else "…" + name[-(MAX_NAME - 1) :]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; wide (East Asian) characters take two places; the last column is free."""
    from rich.cells import cell_len

    widths = [max(cell_len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    return [
        "  ".join([*(cell + " " * (w - cell_len(cell)) for cell, w in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    ]
