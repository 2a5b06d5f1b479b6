"""The reading order: cause before symptom, error before warning, proof before rule of thumb, then code."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace

from ghoststep.finding import Finding, Outcome, Verdict

_OUTCOMES = (Outcome.FOUND, Outcome.BROKEN, Outcome.UNKNOWN, Outcome.CLEAR, Outcome.NOT_APPLICABLE)
_Key = tuple[int, int, int, bool, str, str]


def reading_order(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """The same verdicts in reading order, their findings sorted too. Pure and idempotent; O(n log n + causes).

    A verdict is a cause of another one of the same subject if a finding of it names the other's code among its symptoms.
    A cause takes the place of its worst symptom, so that an error never waits behind its own cause's milder severity.
    Verdicts that name each other are ordered as if they did not.
    """
    items = [replace(v, findings=_sorted_findings(v)) for v in verdicts]
    effects = _effects(items)
    keys = [_lifted_key(i, items, effects) for i in range(len(items))]
    waiting = [0] * len(items)
    for targets in effects:
        for target in targets:
            waiting[target] += 1
    ready = [(keys[i], i) for i in range(len(items)) if waiting[i] == 0]
    heapq.heapify(ready)
    ordered: list[int] = []
    while ready:
        _, i = heapq.heappop(ready)
        ordered.append(i)
        for target in sorted(effects[i]):
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, (keys[target], target))
    ordered += sorted(set(range(len(items))) - set(ordered), key=lambda i: (keys[i], i))
    return tuple(items[i] for i in ordered)


def _sorted_findings(verdict: Verdict) -> tuple[Finding, ...]:
    def key(f: Finding) -> tuple[int, int]:
        return -(f.severity or verdict.severity).rank, (f.basis or verdict.basis).rank

    return tuple(sorted(verdict.findings, key=key))


def _key(v: Verdict) -> _Key:
    found = v.outcome is Outcome.FOUND  # severity and basis say something only about what was found
    ranks = (-v.severity.rank, v.basis.rank) if found else (0, 0)
    return _OUTCOMES.index(v.outcome), *ranks, not v.code.startswith("GS"), v.code, v.subject or ""


def _effects(items: list[Verdict]) -> list[set[int]]:
    """For each verdict, which others are its symptoms."""
    places: dict[tuple[str, str | None], list[int]] = {}
    for i, v in enumerate(items):
        places.setdefault((v.code, v.subject), []).append(i)
    effects: list[set[int]] = []
    for i, v in enumerate(items):
        codes = {s.code for f in v.findings for s in f.symptoms}
        effects.append({j for code in codes for j in places.get((code, v.subject), ()) if j != i})
    return effects


def _lifted_key(start: int, items: list[Verdict], effects: list[set[int]]) -> _Key:
    """The best rank among a verdict and all that follows from it, then its own code."""
    own = _key(items[start])
    seen, todo, best = {start}, [start], own[:3]
    while todo:
        for target in effects[todo.pop()] - seen:
            seen.add(target)
            todo.append(target)
            best = min(best, _key(items[target])[:3])
    return *best, *own[3:]
