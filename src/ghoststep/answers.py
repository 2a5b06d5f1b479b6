"""The four answers of a check, and the usual way to end one. Import them from `ghoststep.registry`, beside `check`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ghoststep.finding import Finding, Power


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """At least one finding. `reason` says what remains open beside them."""

    findings: tuple[Finding, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """Looked, with this power, and saw nothing. `reason` may carry figures worth reading."""

    power: Power | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotApplicable:
    """The question makes no sense here."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Could not look, or not closely enough to call it clear."""

    reason: str


Answer = Found | Clear | NotApplicable | Unknown


def answer(
    findings: Iterable[Finding], *, power: Power | None = None, reason: str | None = None, undecided: str | None = None
) -> Answer:
    """The usual ending of a check: found if there are findings, else unknown if something stayed undecided, else clear."""
    found = tuple(findings)
    if found:
        return Found(findings=found, reason=undecided)
    if undecided is not None:
        return Unknown(reason=undecided)
    return Clear(power=power, reason=reason)
