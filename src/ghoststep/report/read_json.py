"""A JSON report read back, for baselines and comparisons: strict about types, tolerant of keys it does not know.

The classes mirror the JSON that `json_format` writes; msgspec checks every type and names the path of the first mistake.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

import ghoststep
from ghoststep.errors import ConfigError
from ghoststep.finding import (
    Basis,
    Finding,
    Outcome,
    Power,
    Quantity,
    Report,
    Scalar,
    Severity,
    SubjectInfo,
    Symptom,
    Verdict,
    Where,
)

SCHEMA_VERSION = 1
_T = TypeVar("_T")


class _Quantity(msgspec.Struct, frozen=True, kw_only=True):
    value: int | float | str | bool | None
    unit: str = "1"
    text: str | None = None


class _Power(msgspec.Struct, frozen=True, kw_only=True):
    quantity: str
    smallest_detectable: float | None
    unit: str = "1"
    text: str | None = None


class _Finding(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    where: Where = Where()
    measured: _Quantity | None = None
    expected: _Quantity | None = None
    severity: Severity | None = None
    basis: Basis | None = None
    remedy: str | None = None
    symptoms: tuple[Symptom, ...] = ()


class _Verdict(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    name: str
    outcome: Outcome
    severity: Severity
    basis: Basis
    findings: tuple[_Finding, ...]
    reason: str | None = None
    power: _Power | None = None
    seconds: float = 0.0
    subject: str | None = None
    accepted: Annotated[int, msgspec.Meta(ge=0)] = 0


class _Subject(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    name: str
    facts: dict[str, Any] = {}


class _Version(msgspec.Struct, frozen=True, kw_only=True):
    schema: int


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    subjects: tuple[_Subject, ...]
    verdicts: tuple[_Verdict, ...]
    exit_code: Annotated[int, msgspec.Meta(ge=0, le=2)]
    environment: dict[str, str] = {}
    options: dict[str, Any] = {}
    seconds: float = 0.0


def report_from_json(data: bytes, *, source: str = "report") -> Report:
    """Read a report that `render` wrote (this version or a later one of schema 1); `source` names it in errors.

    `ConfigError` says what is wrong and where: not JSON, another schema version, a missing key, a wrong type. The counts in
    "summary" and the fingerprints are not read but computed anew. Cost: linear in the size; nothing in it is executed.
    """
    version = _decode(data, _Version, source).schema
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{source}: report schema {version}, but this ghoststep ({ghoststep.__version__}) reads schema {SCHEMA_VERSION}; "
            "write the report again with this version: ghoststep check ... --format json --output FILE."
        )
    wire = _decode(data, _Report, source)
    return Report(
        subjects=tuple(
            SubjectInfo(kind=x.kind, name=x.name, facts={k: _fact(v, k, source) for k, v in x.facts.items()})
            for x in wire.subjects
        ),
        verdicts=tuple(_read_verdict(v, source) for v in wire.verdicts),
        environment=wire.environment,
        options={k: _restore(v, source) for k, v in wire.options.items()},
        seconds=wire.seconds,
        exit_code=wire.exit_code,
    )


def _decode(data: bytes, kind: type[_T], source: str) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{source}: not a ghoststep report: {error}. Expected what `ghoststep check ... --format json` writes."
        ) from error


def _read_subject(x: _Subject, source: str) -> SubjectInfo:
    return SubjectInfo(kind=x.kind, name=x.name, facts={k: _fact(v, k, source) for k, v in x.facts.items()})


def _read_verdict(v: _Verdict, source: str) -> Verdict:
    return Verdict(
        code=v.code,
        name=v.name,
        outcome=v.outcome,
        severity=v.severity,
        basis=v.basis,
        reason=v.reason,
        power=_read_power(v.power, source),
        findings=tuple(_read_finding(f, source) for f in v.findings),
        seconds=v.seconds,
        subject=v.subject,
        accepted=v.accepted,
    )


def _read_finding(f: _Finding, source: str) -> Finding:
    return Finding(
        message=f.message,
        where=f.where,
        measured=_read_quantity(f.measured, source),
        expected=_read_quantity(f.expected, source),
        severity=f.severity,
        basis=f.basis,
        remedy=f.remedy,
        symptoms=f.symptoms,
    )


def _read_quantity(q: _Quantity | None, source: str) -> Quantity | None:
    return None if q is None else Quantity(value=_restored(q.value, q.text, source), unit=q.unit)


def _read_power(p: _Power | None, source: str) -> Power | None:
    if p is None:
        return None
    smallest = float(_restored(p.smallest_detectable, p.text, source))
    return Power(quantity=p.quantity, smallest_detectable=smallest, unit=p.unit)


def _restored(value: Scalar | None, text: str | None, source: str) -> Scalar:
    if value is not None:
        return value
    if text not in ("nan", "inf", "-inf"):
        raise ConfigError(f'{source}: a value is null, but its "text" is {text!r}; expected "nan", "inf" or "-inf".')
    return float(text)


def _restore(value: object, source: str) -> object:
    """The inverse of `plain`."""
    if isinstance(value, dict):
        if value.keys() == {"value", "text"} and value["value"] is None and value["text"] in ("nan", "inf", "-inf"):
            return float(value["text"])
        return {k: _restore(v, source) for k, v in value.items()}
    return [_restore(v, source) for v in value] if isinstance(value, list) else value


def _fact(value: object, key: str, source: str) -> Scalar:
    restored = _restore(value, source)
    if isinstance(restored, bool | int | float | str):
        return restored
    raise ConfigError(f"{source}: the fact {key!r} of a subject is {restored!r}; expected a number, a text or true/false.")
