"""GitHub-flavoured Markdown for a comment on a pull request: a table of findings, the rest folded."""

from __future__ import annotations

from ghoststep.finding import Finding, Outcome, Quantity, Report, Severity, SubjectInfo, Verdict
from ghoststep.report.escape import for_code_span, for_markdown
from ghoststep.report.order import reading_order
from ghoststep.report.phrases import (
    MAX_FINDINGS,
    by_reason,
    counted,
    finding_severity,
    label,
    labels,
    more_line,
    number,
    place_parts,
    power,
    quantity,
    severity_counts,
    summary_line,
    with_outcome,
)

COMMENT_LIMIT = 60_000
"""Characters; GitHub refuses a comment over 65,536. Past this the remaining findings are only counted."""

_BADGES = {Severity.ERROR: "🔴 error", Severity.WARNING: "🟡 warning", Severity.NOTE: "🔵 note"}
_TABLE = ["| | check | where | what |", "|---|---|---|---|"]


def render(report: Report, *, color: bool = False, width: int = 100) -> str:
    """Heading, subjects, table, folded lists and, as the last line, the counts. At most about 64,000 characters."""
    del color, width
    lines = [f"### ghoststep: {severity_counts(report) or 'nothing found'}", ""]
    lines += [_subject(x) for x in report.subjects]
    lines += ["", *_findings(report)]
    lines += _folded(report)
    return "\n".join([*lines, summary_line(report)]) + "\n"


def _subject(subject: SubjectInfo) -> str:
    facts = " · ".join(f"{for_markdown(k.replace('_', ' '))} {for_markdown(number(v))}" for k, v in subject.facts.items())
    return f"- {for_markdown(subject.kind)} {for_code_span(subject.name)}{' — ' + facts if facts else ''}"


def _findings(report: Report) -> list[str]:
    rows: list[str] = []
    size, left_out = 0, 0
    for v in reading_order(report.verdicts):
        more = more_line(len(v.findings))
        cells = [_row(v, f) for f in v.findings[:MAX_FINDINGS]]
        if v.outcome is Outcome.BROKEN:
            cells = [f"| 💥 broken | {_check(v)} | | {for_markdown(v.reason or 'no reason was given')} |"]
        elif v.outcome is Outcome.FOUND and not cells:
            cells = [f"| {_BADGES[v.severity]} | {_check(v)} | | {for_markdown(v.reason or 'found')} |"]
        cells += [f"| | | | {for_markdown(more)} |"] if more else []
        for cell in cells:
            size += len(cell) + 1
            if size > COMMENT_LIMIT - 10_000:
                left_out += 1
            else:
                rows.append(cell)
    if left_out:
        rows.append(f"| | | | … and {left_out:,} more lines (see --format json) |")
    return [*_TABLE, *rows, ""] if rows else []


def _row(verdict: Verdict, finding: Finding) -> str:
    what = [for_markdown(finding.message)]
    figures = [f"{word} {for_markdown(quantity(q))}" for word, q in _figures(finding)]
    what += [f"<sub>{' · '.join(figures)}</sub>"] if figures else []
    what += [f"**fix:** {for_markdown(finding.remedy)}"] if finding.remedy else []
    what += [f"↳ {for_markdown(s.code)}: {for_markdown(s.message)}" for s in finding.symptoms[:MAX_FINDINGS]]
    where = "<br>".join(for_code_span(p) for p in place_parts(finding.where))
    return f"| {_BADGES[finding_severity(verdict, finding)]} | {_check(verdict)} | {where} | {'<br>'.join(what)} |"


def _figures(finding: Finding) -> list[tuple[str, Quantity]]:
    pairs = (("measured", finding.measured), ("expected", finding.expected))
    return [(word, q) for word, q in pairs if q is not None]


def _check(verdict: Verdict) -> str:
    return for_markdown(label(verdict))


def _folded(report: Report) -> list[str]:
    lines: list[str] = []
    for title, outcome in (("could not look", Outcome.UNKNOWN), ("not applicable", Outcome.NOT_APPLICABLE)):
        verdicts = with_outcome(report, outcome)
        items = [
            f"- {', '.join(map(for_markdown, labels(group)))}: {for_markdown(reason)}" for reason, group in by_reason(verdicts)
        ]
        lines += _details(title, len(verdicts), items)
    clear = with_outcome(report, Outcome.CLEAR)
    return lines + _details("clear", len(clear), [f"- {_check(v)}{_power(v)}" for v in clear])


def _power(verdict: Verdict) -> str:
    said = ([power(verdict.power)] if verdict.power else []) + ([verdict.reason] if verdict.reason else [])
    return f": {for_markdown('; '.join(said))}" if said else ""


def _details(title: str, count: int, items: list[str]) -> list[str]:
    if not items:
        return []
    shown: list[str] = []
    size = 0
    for item in items:
        size += len(item)
        if size > 3_000:
            shown.append(f"- … and {counted(len(items) - len(shown), 'line')} more (see --format json)")
            break
        shown.append(item)
    return [f"<details><summary>{title} ({count})</summary>", "", *shown, "", "</details>", ""]
