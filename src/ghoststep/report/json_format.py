"""The JSON form, schema version 1, written and read back. `ghoststep/schema/report-v1.json` describes it to other tools.

Within version 1 keys may be added, never removed or given another meaning; readers ignore keys they do not know.
Two things JSON cannot hold are written so that any strict parser reads them:

- a number that is not finite: `null` with a sibling "text" ("nan", "inf" or "-inf"); among facts and options, where a value
  has no siblings, the object {"value": null, "text": "nan"};
- a lone surrogate in a string: the visible escape "\\udc80", which is read back as those six characters.

Everything else round-trips exactly. Options are kept as JSON has them: tuples become arrays, keys and foreign objects text.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence

import msgspec

import ghoststep
from ghoststep.finding import (
    Finding,
    Power,
    Quantity,
    Report,
    Scalar,
    Verdict,
)
from ghoststep.report.escape import for_json, utf8_text
from ghoststep.report.fingerprint import fingerprint
from ghoststep.report.read_json import SCHEMA_VERSION, report_from_json

__all__ = ["SCHEMA_VERSION", "finding_object", "plain", "render", "report_from_json", "report_object", "to_json"]


def render(report: Report, *, color: bool = False, width: int = 100) -> str:
    """The whole report as indented, strict JSON. Unseen characters are JSON escapes, so that printing it is safe."""
    del color, width
    return to_json(report_object(report))


def to_json(document: object) -> str:
    """Any plain value as indented, strict JSON with one newline at the end, escaped as `render` says."""
    encoded = msgspec.json.format(msgspec.json.encode(plain(document)), indent=2)
    return for_json(encoded.decode()) + "\n"


def plain(value: object) -> object:
    """`value` in what JSON can hold, by the rules of this module. Keys stay in their order; cost O(size)."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"value": None, "text": str(value)}
    if isinstance(value, Mapping):
        return {utf8_text(str(k)): plain(v) for k, v in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return [plain(v) for v in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    return utf8_text(str(value))


def report_object(report: Report) -> dict[str, object]:
    """The report as plain Python values, in the documented order of keys; see `plain` for what is still to be cleaned."""
    s = report.summary
    summary = {"error": s.error, "warning": s.warning, "note": s.note, "clear": s.clear}
    summary |= {"not_applicable": s.not_applicable, "unknown": s.unknown, "broken": s.broken}
    return {
        "schema": SCHEMA_VERSION,
        "ghoststep": ghoststep.__version__,
        "subjects": [{"kind": x.kind, "name": x.name, "facts": x.facts} for x in report.subjects],
        "environment": report.environment,
        "options": report.options,
        "verdicts": [_verdict(v) for v in report.verdicts],
        "summary": summary,
        "exit_code": report.exit_code,
        "seconds": _seconds(report.seconds),
    }


def finding_object(verdict: Verdict, f: Finding) -> dict[str, object]:
    """One finding; `where` holds only the keys that are set."""
    return {
        "message": f.message,
        "where": dict(f.where.items()),
        "measured": _quantity(f.measured),
        "expected": _quantity(f.expected),
        "severity": f.severity.value if f.severity else None,
        "basis": f.basis.value if f.basis else None,
        "remedy": f.remedy,
        "symptoms": [
            {
                "code": s.code,
                "message": s.message,
                "where": dict(s.where.items()),
                "severity": s.severity.value if s.severity else None,
            }
            for s in f.symptoms
        ],
        "fingerprint": fingerprint(verdict, f),
    }


def _verdict(v: Verdict) -> dict[str, object]:
    return {
        "code": v.code,
        "name": v.name,
        "outcome": v.outcome.value,
        "severity": v.severity.value,
        "basis": v.basis.value,
        "reason": v.reason,
        "power": _power(v.power),
        "findings": [finding_object(v, f) for f in v.findings],
        "seconds": _seconds(v.seconds),
        "subject": v.subject,
        "accepted": v.accepted,
    }


def _quantity(q: Quantity | None) -> dict[str, object] | None:
    return None if q is None else {**_number("value", q.value), "unit": q.unit}


def _power(p: Power | None) -> dict[str, object] | None:
    if p is None:
        return None
    return {"quantity": p.quantity, **_number("smallest_detectable", p.smallest_detectable), "unit": p.unit}


def _number(key: str, value: Scalar) -> dict[str, object]:
    if isinstance(value, float) and not math.isfinite(value):
        return {key: None, "text": str(value)}
    return {key: value}


def _seconds(value: float) -> float:
    return value if math.isfinite(value) else 0.0  # a clock that failed is no reason to lose a report
