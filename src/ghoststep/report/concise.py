"""One line per finding, for grep: `CODE name severity where: message`. Silence would not mean healthy: see `render`."""

from __future__ import annotations

from ghoststep.finding import Finding, Outcome, Report, Verdict
from ghoststep.report.order import reading_order
from ghoststep.report.phrases import finding_severity, label, place, summary_line
from ghoststep.text import visible


def render(report: Report, *, color: bool = False, width: int = 100) -> str:
    """Findings, then a line for each check that broke or could not look, then the counting line."""
    del color, width  # one line is one line
    lines: list[str] = []
    for v in reading_order(report.verdicts):
        if v.outcome is Outcome.FOUND:
            lines += [_finding_line(v, f) for f in v.findings] or [
                f"{label(v)} {v.severity.value}: {visible(v.reason or 'found')}"
            ]
        elif v.outcome in (Outcome.BROKEN, Outcome.UNKNOWN):
            lines.append(f"{label(v)} {v.outcome.value}: {visible(v.reason or 'no reason was given')}")
    return "\n".join([*lines, summary_line(report)]) + "\n"


def _finding_line(verdict: Verdict, finding: Finding) -> str:
    where = place(finding.where)
    head = f"{label(verdict)} {finding_severity(verdict, finding).value}{' ' + where if where else ''}"
    return f"{head}: {visible(finding.message)}"
