"""The report of a watch: the same `Report` as every other surface gives."""

from __future__ import annotations

import time
from typing import Any

from ghoststep.finding import Outcome, Report, Severity, SubjectInfo, Verdict
from ghoststep.text import error_text
from ghoststep.watching.flushing import Flusher


def report(flusher: Flusher, *, num_waiting: int = 0) -> Report:
    """Every check's verdict about the steps so far.

    num_waiting: backwards since the last step. exit_code as for `ghoststep check`: 1 for an error, 2 if a check or hook broke.
    """
    from ghoststep.report.order import reading_order

    start = time.perf_counter()
    try:
        verdicts = flusher.verdicts()
    except Exception as error:
        flusher.faults.keep("report", error)
        verdicts = _unanswered(flusher, error)
    facts = flusher.facts
    told: dict[str, Any] = {"model": facts.model, "steps": flusher.num_steps, "parameters": facts.num_parameters}
    if num_waiting and not flusher.num_steps:
        told["backwards without any step of an optimizer"] = num_waiting
    if facts.world_size > 1:
        told["rank"] = f"{facts.rank} of {facts.world_size}"
    broken = flusher.broken()
    if broken:
        told["broken"] = "; ".join(broken)
    name = str(flusher.run_dir) if flusher.run_dir is not None else facts.model
    return Report(
        subjects=(SubjectInfo(kind="run", name=name, facts=told),), verdicts=reading_order(verdicts),
        environment=dict(facts.versions), options={"detail": facts.detail}, seconds=time.perf_counter() - start,
        exit_code=_exit_code(verdicts, is_broken=bool(broken)),
    )  # fmt: skip


def _unanswered(flusher: Flusher, error: Exception) -> tuple[Verdict, ...]:
    reason = f"the report failed: {error_text(error)}"
    return tuple(
        Verdict(code=c.code, name=c.name, outcome=Outcome.BROKEN, severity=c.severity, basis=c.basis, reason=reason)
        for c in flusher.judge.checks
    )


def _exit_code(verdicts: tuple[Verdict, ...], *, is_broken: bool) -> int:
    found = [v for v in verdicts if v.outcome is Outcome.FOUND]
    if any(v.severity is Severity.ERROR for v in found):
        return 1
    answered = any(v.outcome in (Outcome.FOUND, Outcome.CLEAR) for v in verdicts)
    return 2 if is_broken or not answered or any(v.outcome is Outcome.BROKEN for v in verdicts) else 0
