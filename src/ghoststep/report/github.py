"""Workflow commands that GitHub Actions turns into annotations: `::error title=…,file=…::message`."""

from __future__ import annotations

from ghoststep.finding import Finding, Outcome, Report, Severity, Verdict
from ghoststep.report.escape import github_data, github_property
from ghoststep.report.order import reading_order
from ghoststep.report.phrases import by_reason, finding_severity, label, place, summary_line, with_outcome

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def render(report: Report, *, color: bool = False, width: int = 100) -> str:
    """One command a finding, an error for each broken check, one notice a reason for what could not be looked at.

    Every line but the last starts with a command of ours, and no text can start a second one. The last line is plain.
    """
    del color, width
    lines: list[str] = []
    for v in reading_order(report.verdicts):
        if v.outcome is Outcome.FOUND:
            lines += [_annotation(v, f) for f in v.findings or (Finding(message=v.reason or "no reason was given"),)]
        elif v.outcome is Outcome.BROKEN:
            lines.append(_command("error", f"{label(v)}: the check broke", None, v.reason or "no reason was given"))
    for reason, verdicts in by_reason(with_outcome(report, Outcome.UNKNOWN)):
        lines.append(_command("notice", "could not look: " + ", ".join(v.code for v in verdicts), None, reason))
    return "\n".join([*lines, summary_line(report)]) + "\n"


def _annotation(verdict: Verdict, finding: Finding) -> str:
    where = place(finding.where)
    message = f"{where}: {finding.message}" if where else finding.message
    if finding.remedy:
        message += f" Fix: {finding.remedy}"
    return _command(_COMMANDS[finding_severity(verdict, finding)], label(verdict), finding.where.file, message)


def _command(command: str, title: str, file: str | None, message: str) -> str:
    place_property = f",file={github_property(file)}" if file else ""
    return f"::{command} title={github_property(title)}{place_property}::{github_data(message)}"
