"""After the checks: attach what follows from a found cause to that cause. One cause, one error.

The table is the `explains` and `explains_anywhere` of the checks themselves. A symptom's finding is attached when it stands at the
cause's place (or anywhere) and is not more severe than the cause: a note must not swallow a warning. A verdict whose findings were
all attached stays `found` but becomes a note that names its cause; one with findings left keeps those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ghoststep.finding import Finding, Outcome, Severity, Symptom, Verdict, Where
from ghoststep.registry import Check

_COARSE = ("tensor", "module", "parameter")
_SAYS_NOTHING = ("file", "token")  # a config and its weights are two files of one flaw; a token's string repeats its id


def same_place(cause: Where, symptom: Where) -> bool:
    """True if the symptom stands where the cause is: at the same table row, position, step, ... if the cause names one.

    A cause without such a place explains everything within its tensor, module and parameter, as far as both name them.
    """
    theirs = dict(symptom.items())
    for key, value in cause.items():
        if key in _COARSE:
            if theirs.get(key, value) != value:
                return False
        elif key not in _SAYS_NOTHING and theirs.get(key) != value:
            return False
    return True


def _explains(
    cause: Finding, symptom: Finding, cause_severity: Severity, symptom_severity: Severity, *, anywhere: bool
) -> bool:
    harm = (cause.severity or cause_severity).rank - (symptom.severity or symptom_severity).rank
    return harm >= 0 and (anywhere or same_place(cause.where, symptom.where))


def diagnose(verdicts: Sequence[Verdict], checks: Sequence[Check]) -> tuple[Verdict, ...]:
    """Verdicts in the same order, symptoms moved under their causes. Does not change clear or unknown ones."""
    result = {_key(v): v for v in verdicts}
    for check in checks:
        for key, cause in list(result.items()):
            if cause.name == check.name and cause.outcome is Outcome.FOUND:
                for symptom_name in (*check.explains, *check.explains_anywhere):
                    symptom = result.get((symptom_name, cause.subject))
                    if symptom is not None and symptom.outcome is Outcome.FOUND:
                        anywhere = symptom_name in check.explains_anywhere
                        result[key], result[_key(symptom)] = _attach(result[key], symptom, anywhere=anywhere)
    return tuple(result.values())


def _key(verdict: Verdict) -> tuple[str, str | None]:
    return verdict.name, verdict.subject


def _attach(cause: Verdict, symptom: Verdict, *, anywhere: bool) -> tuple[Verdict, Verdict]:
    causes = list(cause.findings)
    left: list[Finding] = []
    for finding in symptom.findings:
        for i, candidate in enumerate(causes):
            if _explains(candidate, finding, cause.severity, symptom.severity, anywhere=anywhere):
                seen = Symptom(code=symptom.code, message=finding.message, where=finding.where, severity=finding.severity)
                causes[i] = replace(candidate, symptoms=(*candidate.symptoms, seen, *finding.symptoms))
                break
        else:
            left.append(finding)
    if len(left) == len(symptom.findings):
        return cause, symptom
    cause = replace(cause, findings=tuple(causes))
    if left:
        return cause, symptom.with_findings(left)
    reason = f"explained by {cause.code} {cause.name}, where its findings stand as symptoms"
    return cause, replace(symptom, findings=(), severity=Severity.NOTE, reason=reason)
