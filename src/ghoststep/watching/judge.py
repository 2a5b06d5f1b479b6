"""Judging steps while training: the checks that need only a run's record, asked at each flush, each cause told once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ghoststep.diagnosis import diagnose
from ghoststep.engine import Case, ask
from ghoststep.evidence.steps import RankRecord, RunRecord, Step
from ghoststep.finding import Finding, Outcome, Severity, Verdict, Where
from ghoststep.registry import Check, load
from ghoststep.text import error_text
from ghoststep.watching.guarded import traceback_text

logger = logging.getLogger("ghoststep.watch")

WINDOW = 512
"""Steps that a check is shown at most."""

MAX_RAISES = 3
"""Times that one check may raise before it is not asked again."""

MAX_CAUSES = 256
"""Findings of one check that are kept: a run that goes wrong in ever new places must not fill the memory."""

_PASSING = ("file", "token", "example", "position", "document", "micro_batch", "step", "other_example", "other_position")
"""Parts of a place that change while the cause stays: a bad table row is met at another position in every batch."""

Place = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A finding that was not known before. severity and finding are complete. step: the first step it was seen at, None where a
    finding names none. is_first: False if the same cause was told before a rollback already."""

    code: str
    name: str
    severity: Severity
    finding: Finding
    step: int | None
    is_first: bool = True


@dataclass(slots=True)
class _State:
    """What one check has said so far."""

    check: Check
    findings: dict[Place, Finding] = field(default_factory=dict)
    told: set[Place] = field(default_factory=set)
    told_before: set[Place] = field(default_factory=set)
    last: Verdict | None = None
    broken: Verdict | None = None
    cleared_until: int = 0
    num_raised: int = 0
    num_dropped: int = 0
    is_cut: bool = False


def run_checks(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Those that can answer from a `RunRecord` alone: they ask for it, and everything else they ask for may be missing."""
    chosen = []
    for c in checks:
        required = {n.kind for n in c.needs if not n.optional}
        if any(n.kind is RunRecord for n in c.needs) and required <= {RunRecord} and not c.code.startswith("GS9"):
            chosen.append(c)
    return tuple(chosen)


class Judge:
    """Asks every check about the steps of one rank of one run, and remembers what each has said.

    checks: default all built-in and plugged-in ones that need only a run. options: of checks, by name, as in
    `[tool.ghoststep.checks]`. `look` never raises for a defect of a check. Cost: importing the checks, once.
    """

    def __init__(
        self, checks: Sequence[Check] | None = None, *, options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.checks = run_checks(load(with_instruments=False).checks if checks is None else checks)
        self._options = options or {}
        self._states = {c.name: _State(check=c) for c in self.checks}
        self._last_step = 0
        self._broken_hooks: tuple[str, ...] = ()
        self._fault = ""

    def look(self, new_steps: Sequence[Step], record: RunRecord) -> list[Alarm]:
        """Judge the new steps by a record that ends with them; alarms for causes that are new, in the order of the checks.

        record: one rank, at most its last `WINDOW` steps count. Without new steps nothing is asked.
        """
        self._broken_hooks = record.broken or self._broken_hooks
        if not new_steps:
            return []
        window = _window(record)
        verdicts = self._ask(window)
        self._last_step = max(self._last_step, new_steps[-1].number)
        if not any(v.outcome is Outcome.FOUND for v in verdicts):
            return []
        first = min((r.steps[0].number for r in window.ranks if r.steps), default=0)
        for v in verdicts:
            self._keep(self._states[v.name], v, first, new_steps[0].number)
        try:
            diagnosed = diagnose(verdicts, self.checks)
        except Exception as error:  # ours; what was found is told undiagnosed
            self._fault = f"joining symptoms to causes raised {error_text(error)}"
            diagnosed = tuple(verdicts)
        return [alarm for v in diagnosed for alarm in self._alarms(v, first, new_steps[0].number)]

    def _ask(self, window: RunRecord) -> list[Verdict]:
        case = Case([window])
        verdicts = []
        for state in self._states.values():
            if state.num_raised >= MAX_RAISES:
                continue
            verdict = ask(case, state.check, self._options.get(state.check.name))
            if verdict.outcome is Outcome.BROKEN:
                state.num_raised += 1
                if state.broken is None:
                    logger.warning("%s %s broke; training goes on: %s", verdict.code, verdict.name, verdict.reason)
                state.broken = verdict
            else:
                state.last = verdict
                if verdict.outcome is Outcome.CLEAR:
                    state.cleared_until = max((r.steps[-1].number for r in window.ranks if r.steps), default=0)
            verdicts.append(verdict)
        return verdicts

    def _keep(self, state: _State, verdict: Verdict, first: int, first_new: int) -> None:
        """The latest text of each cause, as long as the window still holds all that it counts."""
        for finding in verdict.findings:
            key, is_known = _recognised(finding.where, state.findings, first, first_new)
            known = state.findings.get(key)
            step = None if known is None else known.where.step
            if (is_known and known is None) or (step is not None and step < first):
                state.is_cut = True
            elif not is_known and len(state.findings) >= MAX_CAUSES:
                state.num_dropped += 1
            else:
                state.findings[key] = finding

    def _alarms(self, verdict: Verdict, first: int, first_new: int) -> list[Alarm]:
        state = self._states[verdict.name]
        alarms = []
        for finding in verdict.findings:
            key, is_known = _recognised(finding.where, state.told, first, first_new)
            if is_known or len(state.told) >= MAX_CAUSES:
                continue
            state.told.add(key)
            alarms.append(
                Alarm(
                    code=verdict.code,
                    name=verdict.name,
                    severity=finding.severity or verdict.severity,
                    finding=finding,
                    step=finding.where.step,
                    is_first=key not in state.told_before,
                )
            )
        return alarms

    def restart(self) -> None:
        """After a rollback: a cause that shows again is told again. What was found stays found."""
        for state in self._states.values():
            state.told_before |= state.told
            state.told.clear()

    def verdicts(self, whole: RunRecord | None = None) -> tuple[Verdict, ...]:
        """What to report at the end, diagnosed: once found stays found, and nothing is clear if a hook of ours failed.

        whole: all steps, if every one was recorded; counts in messages then cover the run and not only the last `WINDOW` steps.
        """
        again = (
            {}
            if whole is None
            else {v.name: v for v in (ask(Case([whole]), c, self._options.get(c.name)) for c in self.checks)}
        )
        merged = [self._final(state, again.get(name)) for name, state in self._states.items()]
        try:
            return diagnose(merged, self.checks)
        except Exception as error:
            logger.warning("symptoms could not be joined to their causes\n%s", traceback_text(error))
            return tuple(merged)

    def _final(self, state: _State, whole: Verdict | None) -> Verdict:
        check = state.check
        base = Verdict(
            code=check.code, name=check.name, outcome=Outcome.UNKNOWN, severity=check.severity, basis=check.basis,
            reason="no step was judged: training ended before the first flush, or nothing was watched",
        )  # fmt: skip
        said = state.last or base
        if whole is not None and whole.outcome is Outcome.BROKEN:
            whole, state.broken = None, state.broken or whole
        if whole is not None:
            said = whole
        every = list(said.findings) if whole is not None and whole.findings else list(state.findings.values())
        if every:
            return replace(said, reason=self._open_points(state, whole), power=None).with_findings(every)
        if state.broken is not None:
            return replace(state.broken, reason=f"{state.broken.reason}{self._times(state)}")
        if said.outcome is Outcome.CLEAR and self._broken_hooks:
            reason = f"could not look at everything: a hook of ghoststep failed ({'; '.join(self._broken_hooks)[:500]})"
            return replace(said, outcome=Outcome.BROKEN, reason=reason, power=None)
        if said.outcome is not Outcome.CLEAR and whole is None and 0 < state.cleared_until < self._last_step:
            return replace(said, reason=f"clear until step {state.cleared_until}; after that: {said.reason}")
        return said

    def _open_points(self, state: _State, whole: Verdict | None) -> str | None:
        points = []
        if whole is not None and whole.reason:
            points.append(whole.reason)
        if state.is_cut and whole is None:
            points.append(f"counts end where the first case left the last {WINDOW} steps; `ghoststep check RUN` counts all")
        if state.num_dropped:
            points.append(f"further places were not kept ({MAX_CAUSES} are)")
        if state.broken is not None:
            points.append(f"once it broke: {state.broken.reason}")
        if self._broken_hooks:
            points.append(f"a hook of ghoststep failed ({'; '.join(self._broken_hooks)[:500]})")
        if self._fault:
            points.append(self._fault)
        return "; ".join(points) or None

    @staticmethod
    def _times(state: _State) -> str:
        return f" (and was not asked again after {MAX_RAISES} times)" if state.num_raised >= MAX_RAISES else ""


def _recognised(where: Where, known: Collection[Place], first: int, first_new: int) -> tuple[Place, bool]:
    """The key of the finding's cause, and whether that is known.

    A cause that names a place (a table row, a parameter) is one cause at whatever step. One that does not (a spike of the loss)
    is another one at another step; only where its step is old and all known ones have left the window, it is the same one, whose
    beginning is out of sight. first: the window's first step; first_new: the first one that was not judged before.
    """
    place = tuple((key, value) for key, value in where.items() if key not in _PASSING)
    if any(key != "rank" for key, _ in place):
        return place, place in known
    step = where.step or 0
    key = (*place, ("step", step))
    if key in known:
        return key, True
    before = [int(k[-1][1]) for k in known if k[:-1] == place and k[-1][0] == "step"]
    return key, bool(before) and step < first_new and max(before) < first


def _window(record: RunRecord) -> RunRecord:
    if all(len(r.steps) <= WINDOW for r in record.ranks):
        return record
    return replace(record, ranks=tuple(_last(r) for r in record.ranks))


def _last(rank: RankRecord) -> RankRecord:
    return replace(rank, steps=rank.steps[-WINDOW:])
