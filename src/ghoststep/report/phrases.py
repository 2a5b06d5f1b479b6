"""Small phrases that several formats share: the counting line, places, quantities. Plain text, already made visible."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from ghoststep.finding import Finding, Outcome, Power, Quantity, Report, Scalar, Severity, Verdict, Where
from ghoststep.text import printable, visible

MAX_FINDINGS = 20
"""How many findings of one verdict the formats for people print; JSON, SARIF and the others for programs keep all."""


_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def counted(number: int, noun: str) -> str:
    """ "1 error", "2 errors" """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def severity_counts(report: Report) -> str:
    """ "1 error, 2 notes"; "" when nothing was found."""
    s = report.summary
    return ", ".join(counted(n, word) for n, word in ((s.error, "error"), (s.warning, "warning"), (s.note, "note")) if n)


def summary_line(report: Report) -> str:
    """ "12 clear · 1 found (1 error) · 3 not applicable · 2 could not look · 0 broken", and what was accepted, if anything."""
    s = report.summary
    found = f"{s.found} found ({severity_counts(report)})" if s.found else "0 found"
    parts = [
        f"{s.clear} clear",
        found,
        f"{s.not_applicable} not applicable",
        f"{s.unknown} could not look",
        f"{s.broken} broken",
    ]
    accepted = sum(v.accepted for v in report.verdicts)
    if accepted:
        parts.append(f"{counted(accepted, 'finding')} accepted")
    return " · ".join(parts)


def number(value: Scalar) -> str:
    """A value for people: 151,936 · 3.1e-12 · nan · yes · visible text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**15 else f"{value:.4e}" if abs(value) < 10**300 else "over 1e300"
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def quantity(q: Quantity) -> str:
    """ "3.1e-12 L2 norm"; a pure number stands alone."""
    if q.unit == "1":
        return number(q.value)
    is_name = isinstance(q.value, int) and re.search(r"\b(id|token_id|table row)$", q.unit)
    return f"{q.value if is_name else number(q.value)} {visible(q.unit)}"  # ids are names: 151645, not 151,645


def power(p: Power) -> str:
    """The smallest effect a clear verdict would have seen, in words. A unit that the quantity already names is not repeated."""
    unit = "1" if p.unit in p.quantity else p.unit
    return f"would have seen {visible(p.quantity)} ≥ {quantity(Quantity(value=p.smallest_detectable, unit=unit))}"


def expected(measured: Quantity, wanted: Quantity) -> str:
    """The expected value beside a measured one: without its unit where that is the same."""
    return number(wanted.value) if wanted.unit == measured.unit else quantity(wanted)


def place(where: Where) -> str:
    """The place on one line, largest first: "model.embed_tokens.weight · token 151647 '<s>'"; "" if unset."""
    return " · ".join(place_parts(where))


def place_parts(where: Where) -> list[str]:
    """The pieces of `place`. A table row that equals the token id is said once."""
    parts = [visible(v) for v in (where.file, where.tensor, where.module, where.parameter) if v is not None]
    if where.table_row is not None and where.table_row != where.token_id:
        parts.append(f"table row {where.table_row}")
    token = [] if where.token_id is None else [str(where.token_id)]
    token += [] if where.token is None else [printable(where.token)]
    if token:
        parts.append("token " + " ".join(token))
    rest: list[tuple[str, int | str | None]] = [
        ("example", where.example),
        ("position", where.position),
        ("document", where.document),
    ]
    rest += [("other example", where.other_example), ("other position", where.other_position)]
    rest += [("key", where.key if where.key is None else visible(where.key)), ("parameter group", where.group)]
    rest += [("micro-batch", where.micro_batch), ("step", where.step), ("rank", where.rank)]
    return parts + [f"{word} {value}" for word, value in rest if value is not None]


def finding_severity(verdict: Verdict, finding: Finding) -> Severity:
    """The finding's own severity, or that of its verdict."""
    return finding.severity or verdict.severity


def with_outcome(report: Report, outcome: Outcome) -> tuple[Verdict, ...]:
    """The verdicts with this outcome, in the report's order."""
    return tuple(v for v in report.verdicts if v.outcome is outcome)


def label(verdict: Verdict) -> str:
    """ "GS301 near-zero-input-rows", and the subject where several were looked at."""
    subject = f" ({visible(verdict.subject)})" if verdict.subject is not None else ""
    return f"{visible(verdict.code)} {visible(verdict.name)}{subject}"


def by_reason(verdicts: Iterable[Verdict]) -> list[tuple[str, list[Verdict]]]:
    """Verdicts that give the same reason together, in order of first appearance."""
    groups: dict[str, list[Verdict]] = {}
    for v in verdicts:
        groups.setdefault(v.reason or "no reason was given", []).append(v)
    return list(groups.items())


def more_line(num_findings: int) -> str | None:
    """What is said instead of the findings past `MAX_FINDINGS`; None when all are shown."""
    left = num_findings - MAX_FINDINGS
    return f"… and {left:,} more (see --format json)" if left > 0 else None


def labels(verdicts: Sequence[Verdict], most: int = 8) -> list[str]:
    """Codes with names, or, of more than `most`, runs of codes alone: "GS101–GS111"."""
    if len(verdicts) <= most:
        return [label(v) for v in verdicts]
    runs: list[list[str]] = []
    for code in sorted({v.code for v in verdicts}):
        if runs and code[:-3] == runs[-1][-1][:-3] and int(code[-3:]) == int(runs[-1][-1][-3:]) + 1:
            runs[-1].append(code)
        else:
            runs.append([code])
    return [visible(run[0] if len(run) == 1 else f"{run[0]}–{run[-1]}") for run in runs]


def unsaid(message: str, said: set[str]) -> str:
    """The sentences of a message that this reader has not seen yet; `said` grows by them. The first one always stays.

    Findings of one verdict explain themselves with the same sentences: whole in a file, tiresome on a screen.
    """
    first, *rest = _SENTENCE_END.split(message)
    fresh = [sentence for sentence in rest if sentence not in said]
    said.update(rest)
    return " ".join((first, *fresh))
