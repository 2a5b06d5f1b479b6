"""Checks and records for the tests of judging: small, and each with one behaviour."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ghoststep.evidence.base import Missing
from ghoststep.evidence.steps import RankRecord, RunFacts, RunRecord, Step
from ghoststep.evidence.training import StepProbe
from ghoststep.finding import Basis, Finding, Severity, Where
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS401", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("spiking-loss",))
def zeroed_step(run: RunRecord) -> Answer:
    """One finding a table row: its first step in the window, and how many."""
    lost: dict[int, list[Step]] = {}
    for step in run.ranks[0].steps:
        if step.num_gradients and step.num_zero_after == step.num_gradients:
            lost.setdefault(step.rows[0].token_id if step.rows else 0, []).append(step)
    return answer(
        Finding(
            message=f"row {row}: {len(steps)} steps",
            where=Where(table_row=row, position=steps[-1].number, step=steps[0].number),
        )
        for row, steps in lost.items()
    )


@check(code="GS408", severity=Severity.WARNING, basis=Basis.MEASURED)
def spiking_loss(run: RunRecord) -> Answer:
    """One finding a spike, at its step and at no other place."""
    return answer(
        Finding(message=f"loss {s.loss}", where=Where(step=s.number)) for s in run.ranks[0].steps if s.loss and s.loss > 100
    )


@check(code="GS404", severity=Severity.ERROR, basis=Basis.PROOF)
def nan_loss(run: RunRecord) -> Answer:
    """One finding for all: the first step in the window, and how many."""
    bad = [s for s in run.ranks[0].steps if s.loss is not None and math.isnan(s.loss)]
    return answer([Finding(message=f"{len(bad)} steps", where=Where(step=bad[0].number))] if bad else [])


@check(code="GS410", severity=Severity.NOTE, basis=Basis.RULE_OF_THUMB)
def needs_history(run: RunRecord) -> Answer:
    """Unknown while it has seen too little."""
    return answer([]) if len(run.ranks[0].steps) >= 20 else Unknown(reason="fewer than 20 steps")


@check(code="GS411", severity=Severity.WARNING, basis=Basis.MEASURED)
def raising(run: RunRecord) -> Answer:
    """A check with a defect of its own from step 10 on."""
    if run.ranks[0].steps[-1].number >= 10:
        raise RuntimeError("a defect")
    return answer([])


@check(code="GS405", severity=Severity.ERROR, basis=Basis.PROOF)
def nonfinite_gradient(probe: StepProbe | Missing, run: RunRecord | Missing) -> Answer:
    """Answers for a setup or a run."""
    return NotApplicable(reason="neither") if isinstance(run, Missing) else answer([])


@check(code="GS499", severity=Severity.ERROR, basis=Basis.PROOF)
def of_setups_only(probe: StepProbe) -> Answer:
    """Needs a setup."""
    return answer([])


ALL = (zeroed_step, nan_loss, nonfinite_gradient, spiking_loss, needs_history, raising, of_setups_only)


def healthy(number: int, loss: float = 2.0) -> Step:
    """An ordinary step."""
    return Step(
        number=number, ended_at=float(number), loss=loss, norm=1.0, norm_after=1.0, num_gradients=4, num_zero_after=0, moved=1e-3
    )  # fmt: skip


def record(steps: Sequence[Step], broken: tuple[str, ...] = ()) -> RunRecord:
    """A live record of one rank."""
    return RunRecord(ranks=(RankRecord(facts=RunFacts(), steps=tuple(steps)),), is_live=True, broken=broken)
