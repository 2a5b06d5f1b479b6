"""The score as Markdown: totals, the table, what was not found first, false alarms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tests.mutations.architectures import ARCHITECTURES
from tests.mutations.faults import FAULTS

if TYPE_CHECKING:
    from tests.mutations.fault import Fault
    from tests.mutations.score import Cell

SIGNS = {
    "first": ("1", "found as the first error (or warning, where a warning is expected)"),
    "later": ("2", "found, behind another error"),
    "weak": ("w", "found first, as a warning where an error is expected"),
    "wrong": ("X", "another code was reported"),
    "missed": ("0", "nothing was reported"),
    "unknown": ("?", "the check could not look"),
    "broken": ("!", "the check raised"),
    "harmless": ("h", "harm below the bound: not scored"),
}
ABSENT = "·"
_NOT_FIRST = ("later", "weak", "wrong", "missed", "unknown", "broken")


def table(cells: Sequence[Cell], seconds: float, variants: Mapping[str, Sequence[Cell]] | None = None) -> str:
    """The whole document. `variants`: cells of the other modes and types, for a second table of totals."""
    scored = [c for c in cells if c.outcome != "harmless"]
    first = sum(c.outcome == "first" for c in scored)
    counts = Counter(c.outcome for c in cells)
    as_warning = sum(c.outcome == "first" and c.heard[:1] != () and c.heard[0].severity == "warning" for c in scored)
    alarmed = {(c.arch, h.code, h.message) for c in cells for h in c.alarms}
    lines = [
        "# Planted faults",
        "",
        "What `ghoststep.check(**setup)` says first about known bugs planted in small models; see `tests/mutations`.",
        "Written by `python -m tests.mutations.score --output benchmarks/mutation_table.md`.",
        "",
        f"**Found first / harmful: {first} / {len(scored)}** over {len({c.fault for c in cells})} faults and "
        f"{len({c.arch for c in cells})} architectures; {len(alarmed)} different errors or warnings about healthy twins.",
        f"{as_warning} of those found are warnings, where the fault asks for a warning at least.",
        f"{len(cells)} cells in {seconds:.0f} s; a check took {median([c.seconds for c in cells]):.2f} s (median), "
        f"{max((c.seconds for c in cells), default=0.0):.2f} s (longest).",
        "",
        "| sign | meaning | cells |",
        "|---|---|---|",
        *(f"| {sign} | {meaning} | {counts[name]} |" for name, (sign, meaning) in SIGNS.items()),
        f"| {ABSENT} | does not apply | |",
        "",
        *_grid(cells),
        "",
        *_harms(cells),
        "",
        *_misses(scored),
        *_alarms(cells),
        *_variants(variants or {}),
    ]
    return "\n".join(lines) + "\n"


def median(values: Sequence[float]) -> float:
    """The middle value, 0 of nothing."""
    return sorted(values)[len(values) // 2] if values else 0.0


def _grid(cells: Sequence[Cell]) -> list[str]:
    arch_names = [a.name for a in ARCHITECTURES if any(c.arch == a.name for c in cells)]
    by_place = {(c.fault, c.arch): c for c in cells}
    rows = [
        "## Cells",
        "",
        "| fault | code | at least | " + " | ".join(arch_names) + " | first / harmful |",
        "|---|---|---|" + "---|" * (len(arch_names) + 1),
    ]
    for fault in _present(cells):
        places = [by_place.get((fault.name, a)) for a in arch_names]
        scored = [c for c in places if c is not None and c.outcome != "harmless"]
        signs = " | ".join(ABSENT if c is None else SIGNS[c.outcome][0] for c in places)
        share = f"{sum(c.outcome == 'first' for c in scored)} / {len(scored)}"
        rows.append(f"| {fault.name} | {' or '.join(fault.codes)} | {fault.severity} | {signs} | {share} |")
    return rows


def _present(cells: Sequence[Cell]) -> list[Fault]:
    names = {c.fault for c in cells}
    return [f for f in FAULTS if f.name in names]


def _harms(cells: Sequence[Cell]) -> list[str]:
    rows = ["## Harm, measured without ghoststep", "", "| fault | smallest | largest | bound | unit |", "|---|---|---|---|---|"]
    for fault in _present(cells):
        harms = [c.harm for c in cells if c.fault == fault.name]
        rows.append(f"| {fault.name} | {min(harms):.2g} | {max(harms):.2g} | {fault.bound:g} | {fault.unit} |")
    return rows


def _misses(scored: Sequence[Cell]) -> list[str]:
    kinds: dict[tuple[str, str, str], list[Cell]] = {}
    for c in scored:
        if c.outcome != "first":
            said = c.heard[0].code if c.heard else "nothing"
            kinds.setdefault((c.fault, c.outcome, said), []).append(c)
    rows = ["## Not found first", ""] if kinds else ["Everything harmful was found first.", ""]
    for (fault, outcome, said), group in sorted(kinds.items(), key=lambda item: -len(item[1])):
        one = group[0]
        message = _short(one.heard[0].message) if one.heard else one.reason
        rows += [
            f"- **{fault}**: {SIGNS[outcome][1]} ({len(group)}: {', '.join(c.arch for c in group)}); said first: {said}.",
            f"  {one.arch}: {_short(message)}",
            f"  asked: {_short(one.reason)}",
            f"  `python -m tests.mutations.score --fault {fault} --arch {one.arch}`",
        ]
    return [*rows, ""]


def _alarms(cells: Sequence[Cell]) -> list[str]:
    kinds: dict[tuple[str, str, str], list[tuple[Cell, str]]] = {}
    for c in cells:
        for h in c.alarms:
            code = "several checks" if h.severity == "broken" else h.code
            kinds.setdefault((code, h.severity, h.message[:40]), []).append((c, h.message))
    rows = ["## Errors and warnings about healthy twins", ""] if kinds else ["Every healthy twin was silent."]
    for (code, severity, _), group in sorted(kinds.items(), key=lambda item: -len(item[1])):
        archs, faults = sorted({c.arch for c, _ in group}), sorted({c.fault for c, _ in group})
        rows += [
            f"- **{code}** ({severity}), {len(group)} cells; {len(archs)} architectures: {', '.join(archs)}; "
            f"twins of {len(faults)} faults: {', '.join(faults[:8])}{' …' if len(faults) > 8 else ''}",
            f"  {group[0][0].arch}: {_short(group[0][1])}",
            f"  `python -m tests.mutations.score --fault {group[0][0].fault} --arch {group[0][0].arch}`",
        ]
    return rows


def _variants(variants: Mapping[str, Sequence[Cell]]) -> list[str]:
    if not variants:
        return []
    rows = [
        "",
        "## Other modes and types",
        "",
        "The same faults of labels, masks, recurrence, routing, documents, examples, positions and encoders in eval mode, with "
        "bfloat16 and float16 weights, with `fast=True`, and in DistributedDataParallel of one process.",
        "",
        "| variant | architectures | first / harmful | "
        + " | ".join(SIGNS[name][0] for name in _NOT_FIRST)
        + " | twins told |",
        "|---|---|---|" + "---|" * (len(_NOT_FIRST) + 1),
    ]
    for variant, cells in variants.items():
        scored = [c for c in cells if c.outcome != "harmless"]
        counts = Counter(c.outcome for c in scored)
        alarmed = len({(c.arch, h.code) for c in cells for h in c.alarms})
        others = " | ".join(str(counts[name]) for name in _NOT_FIRST)
        rows.append(
            f"| {variant} | {len({c.arch for c in cells})} | {counts['first']} / {len(scored)} | {others} | {alarmed} |"
        )
    rows.append("")
    for variant, cells in variants.items():
        kinds: dict[tuple[str, str, str], list[str]] = {}
        for c in cells:
            if c.outcome not in ("first", "harmless"):
                kinds.setdefault((c.fault, c.outcome, _short(c.heard[0].message if c.heard else c.reason, 160)), []).append(
                    c.arch
                )
        rows += [
            f"- {variant}, **{fault}**: {SIGNS[outcome][1]} ({', '.join(archs)}): {said}"
            for (fault, outcome, said), archs in kinds.items()
        ]
    return rows


def _short(text: str, limit: int = 400) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
