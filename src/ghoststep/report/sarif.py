"""SARIF 2.1.0, for code-scanning services and editors.

Only findings become results. GitHub code scanning reads every result as an alert, whatever its `kind`, and refuses a whole
file for one result without a location: so verdicts that could not look or broke are notifications of the invocation, clear
and not-applicable ones stand in the run's properties, and every result has a physical location.
"""

from __future__ import annotations

import ghoststep
from ghoststep.finding import Finding, Outcome, Report, Severity, Verdict, Where
from ghoststep.registry import Check
from ghoststep.report.escape import relative_uri, sarif_text
from ghoststep.report.fingerprint import fingerprint
from ghoststep.report.json_format import finding_object, report_object, to_json
from ghoststep.report.order import reading_order
from ghoststep.report.phrases import finding_severity, place
from ghoststep.text import visible

SCHEMA_URI = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
FINGERPRINT = "ghoststep/v1"
_KINDS = {Outcome.FOUND: "fail", Outcome.CLEAR: "pass", Outcome.NOT_APPLICABLE: "notApplicable", Outcome.UNKNOWN: "open"}
_LOGICAL = ("tensor", "module", "parameter", "table_row", "token_id", "token", "example", "position", "document", "rank")


def render(report: Report, *, color: bool = False, width: int = 100) -> str:
    """One run, ending with a newline. Rules carry the checks' own pages where the checks are installed."""
    del color, width
    verdicts = reading_order(report.verdicts)
    codes = list(dict.fromkeys(v.code for v in verdicts))
    checks = _checks(codes)
    by_code = {v.code: v for v in verdicts}
    bases = {x.name: f"SUBJECT{i}" for i, x in enumerate(report.subjects)}
    run: dict[str, object] = {
        "tool": {
            "driver": {
                "name": "ghoststep",
                "version": ghoststep.__version__,
                "semanticVersion": ghoststep.__version__,
                "rules": [_rule(by_code[code], checks.get(code)) for code in codes],
            }
        },
        "invocations": [_invocation(report, verdicts, codes)],
        "originalUriBaseIds": {base: {"description": {"text": sarif_text(name)}} for name, base in bases.items()},
        "columnKind": "unicodeCodePoints",
        "results": [
            _result(v, f, codes.index(v.code), _base(v, report, bases))
            for v in verdicts
            if v.outcome is Outcome.FOUND
            for f in v.findings
        ],
        "properties": _properties(report, verdicts),
    }
    return to_json({"$schema": SCHEMA_URI, "version": "2.1.0", "runs": [run]})


def _checks(codes: list[str]) -> dict[str, Check]:
    """The installed checks with these codes; a report may come from elsewhere, and a plugin may be broken."""
    from ghoststep import registry  # lazy: walking the checks is needed here only

    try:
        return {c.code: c for c in registry.load(with_instruments=False).checks if c.code in codes}
    except Exception:  # a stranger's check must not cost the user the report; its rule then has a name only
        return {}


def _rule(verdict: Verdict, check: Check | None) -> dict[str, object]:
    rule: dict[str, object] = {
        "id": visible(verdict.code),
        "name": visible(verdict.name),
        "properties": {"basis": verdict.basis.value, "tags": ["machine-learning", "training"]},
    }
    if check is not None:
        page = "\n".join(sarif_text(line) for line in check.doc.splitlines())
        rule["shortDescription"] = {"text": sarif_text(check.flaw or check.name)}
        rule["help"] = {"text": page or sarif_text(check.name), "markdown": page or sarif_text(check.name)}
        rule["defaultConfiguration"] = {"level": check.severity.value}
    return rule


def _invocation(report: Report, verdicts: tuple[Verdict, ...], codes: list[str]) -> dict[str, object]:
    notifications = []
    for v in verdicts:
        if v.outcome in (Outcome.UNKNOWN, Outcome.BROKEN):
            broken = v.outcome is Outcome.BROKEN
            saying = "the check broke" if broken else "could not look"
            text = f"{v.code} {v.name}: {saying}: {v.reason or 'no reason was given'}"
            rule = {"id": visible(v.code), "index": codes.index(v.code)}
            level = "error" if broken else "warning"
            notifications.append({"level": level, "message": {"text": sarif_text(text)}, "associatedRule": rule})
    return {
        "executionSuccessful": report.exit_code != 2,
        "exitCode": report.exit_code,
        "toolExecutionNotifications": notifications,
    }


def _base(verdict: Verdict, report: Report, bases: dict[str, str]) -> tuple[str, str | None]:
    """The subject that the verdict is about: its name, and the base its file names are relative to."""
    if verdict.subject is not None:
        return verdict.subject, bases.get(verdict.subject)
    if len(report.subjects) == 1:
        return report.subjects[0].name, bases[report.subjects[0].name]
    return " ".join(x.name for x in report.subjects), None


def _result(verdict: Verdict, finding: Finding, rule_index: int, base: tuple[str, str | None]) -> dict[str, object]:
    severity = finding_severity(verdict, finding)
    where = place(finding.where)
    text = f"{where}: {finding.message}" if where else finding.message
    if finding.remedy:
        text += f" Fix: {finding.remedy}"
    return {
        "ruleId": visible(verdict.code),
        "ruleIndex": rule_index,
        "kind": "fail",
        "level": severity.value,
        "message": {"text": sarif_text(text)},
        "locations": [_location(finding.where, base)],
        "partialFingerprints": {FINGERPRINT: fingerprint(verdict, finding)},
        "rank": {Severity.ERROR: 90.0, Severity.WARNING: 50.0, Severity.NOTE: 10.0}[severity],
        "properties": {"ghoststep": finding_object(verdict, finding)},
    }


def _location(where: Where, base: tuple[str, str | None]) -> dict[str, object]:
    subject, base_id = base
    artifact: dict[str, object] = {"uri": relative_uri(where.file if where.file is not None else subject)}
    if where.file is not None and base_id is not None:
        artifact["uriBaseId"] = base_id
    location: dict[str, object] = {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": 1}}}
    logical = [
        {"name": visible(str(value)), "fullyQualifiedName": visible(f"{key}={value}"), "kind": key.replace("_", "-")}
        for key, value in where.items()
        if key in _LOGICAL
    ]
    if logical:
        location["logicalLocations"] = logical
    return location


def _properties(report: Report, verdicts: tuple[Verdict, ...]) -> dict[str, object]:
    """What SARIF has no better place for: all verdicts in short, with the kind SARIF would give them, and the counts."""
    brief = []
    for v in verdicts:
        kind = _KINDS.get(v.outcome)
        brief.append({"code": v.code, "name": v.name, "subject": v.subject, "outcome": v.outcome.value, "kind": kind})
        brief[-1]["reason"] = v.reason
    whole = report_object(report)
    return {key: whole[key] for key in ("subjects", "environment", "options", "summary", "seconds")} | {"verdicts": brief}
