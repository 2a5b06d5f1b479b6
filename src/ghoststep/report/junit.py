"""JUnit XML, for CI dashboards: a testsuite a subject, a testcase a verdict.

Error → failure; warning and note → passed, with the text in system-out (a dashboard knows no third colour, and the exit code
follows `--fail-on`); broken → error; could not look and not applicable → skipped, with the reason.
"""

from __future__ import annotations

import math
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from ghoststep.finding import Finding, Outcome, Report, Severity, Verdict
from ghoststep.report.order import reading_order
from ghoststep.report.phrases import finding_severity, place, power, quantity
from ghoststep.text import visible


def render(report: Report, *, color: bool = False, width: int = 100) -> str:
    """A <testsuites> document with its XML declaration, ending with a newline."""
    del color, width
    suites: dict[str, list[Verdict]] = {}
    everything = " + ".join(f"{x.kind} {x.name}" for x in report.subjects) or "ghoststep"
    kinds = {x.name: x.kind for x in report.subjects}
    for v in reading_order(report.verdicts):
        subject = everything if v.subject is None else f"{kinds.get(v.subject, 'subject')} {v.subject}"
        suites.setdefault(subject, []).append(v)
    root = Element("testsuites", {"name": "ghoststep", **_counts(report.verdicts)})
    for name, verdicts in suites.items():
        _suite(root, name, verdicts, report)
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _counts(verdicts: list[Verdict] | tuple[Verdict, ...]) -> dict[str, str]:
    skipped = sum(v.outcome in (Outcome.UNKNOWN, Outcome.NOT_APPLICABLE) for v in verdicts)
    return {
        "tests": str(len(verdicts)),
        "failures": str(sum(_fails(v) for v in verdicts)),
        "errors": str(sum(v.outcome is Outcome.BROKEN for v in verdicts)),
        "skipped": str(skipped),
        "time": _seconds(sum(v.seconds for v in verdicts)),
    }


def _suite(root: Element, name: str, verdicts: list[Verdict], report: Report) -> None:
    suite = SubElement(root, "testsuite", {"name": visible(name), **_counts(verdicts)})
    if report.environment:  # the schema wants properties first and at least one of them
        properties = SubElement(suite, "properties")
        for key, value in report.environment.items():
            SubElement(properties, "property", {"name": visible(key), "value": visible(value)})
    for v in verdicts:
        _case(suite, v, visible(name))


def _case(suite: Element, v: Verdict, subject: str) -> None:
    case = SubElement(
        suite, "testcase", {"name": visible(f"{v.code} {v.name}"), "classname": subject, "time": _seconds(v.seconds)}
    )
    reason = visible(v.reason or "no reason was given")
    if v.outcome in (Outcome.UNKNOWN, Outcome.NOT_APPLICABLE):
        prefix = "could not look: " if v.outcome is Outcome.UNKNOWN else "not applicable: "
        SubElement(case, "skipped", {"message": prefix + reason})
    elif v.outcome is Outcome.BROKEN:
        SubElement(case, "error", {"type": "broken-check", "message": reason})
    elif v.outcome is Outcome.FOUND:
        failing = [f for f in v.findings if finding_severity(v, f) is Severity.ERROR]
        milder = [f for f in v.findings if finding_severity(v, f) is not Severity.ERROR]
        if _fails(v):
            message = visible(failing[0].message) if failing else reason
            failure = SubElement(case, "failure", {"type": visible(v.name), "message": message})
            failure.text = "\n".join(_lines(v, f) for f in failing) or reason
        text = [_lines(v, f) for f in milder] + ([f"open: {reason}"] if v.reason else [])
        if text:
            SubElement(case, "system-out").text = "\n".join(text)
    elif v.power is not None or v.reason is not None:
        SubElement(case, "system-out").text = "; ".join(([power(v.power)] if v.power else []) + ([reason] if v.reason else []))


def _fails(v: Verdict) -> bool:
    return v.outcome is Outcome.FOUND and Severity.ERROR in (v.severity, *(finding_severity(v, f) for f in v.findings))


def _lines(verdict: Verdict, finding: Finding) -> str:
    where = place(finding.where)
    lines = [f"{finding_severity(verdict, finding).value}: {visible(finding.message)}"]
    lines += [f"  where: {where}"] if where else []
    lines += [f"  measured: {quantity(finding.measured)}"] if finding.measured else []
    lines += [f"  expected: {quantity(finding.expected)}"] if finding.expected else []
    lines += [f"  fix: {visible(finding.remedy)}"] if finding.remedy else []
    lines += [f"  symptom {visible(s.code)}: {visible(s.message)}" for s in finding.symptoms]
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value:.6f}" if math.isfinite(value) and value >= 0 else "0.000000"
