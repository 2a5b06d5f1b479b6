"""GS420."""

import math

from ghoststep.evidence.steps import RunRecord, Step, StepOutcome
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.step_findings import all_stretches, long_runs, looked_at, refusal, steps_at, was_taken
from ghoststep.step_texts import cost_text

MANY_IN_A_ROW = 64
"""Steps without any gradient that are no chance any more: with half of the batches empty it is 5e-20."""
LEAST_LOST = 8
"""Steps whose gradients arrived and were zeroed, from which that is more than a bad batch or two left out."""
MOST_NUMBERS = 8
"""Steps that are named by number."""


@check(code="GS420", severity=Severity.NOTE, basis=Basis.PROOF)
def empty_step(run: RunRecord) -> Answer:
    """A training step from whose batch nothing is learned: backward leaves every gradient at exactly zero.

    ## What it finds
    Steps that the optimizer took with gradients of exactly zero in every tensor, before any clipping, on every rank. One note for
    all of them, with their number, the first ones and their cost; one more for those in which a gradient reached the input table's
    output, so that it was set to zero after backward, or masked; and one for steps without any gradient at all among others that
    had one. 64 such steps in a row are a warning. Gradients that arrived and were zero all the same are a warning in a tenth of the
    steps, an error in half of them. Also, as a note, backwards whose gradients were thrown away before any step.

    ## Why it matters
    A batch without any label, behind a loss that guards itself against 0 / 0, costs a step and says nothing. The optimizer still
    moves the weights by momentum and decay, and the average of the loss looks better than it is.

    ## When it is not a problem
    Groups of equal rewards in reinforcement learning, and margin losses whose every margin is kept, look exactly the same and are
    healthy: this is a note. Steps whose gradients were cleared after they had been measured are told by zeroed-step, a loss that is
    NaN by hidden-nan-loss, skips by skipped-by-scaler.

    ## How to confirm by hand
    `(labels != -100).sum()` of the batch; the rewards of each group; the loss before it is guarded or multiplied.

    ## How to fix
    Leave examples without a label out before batches are made (a prompt that fills the whole length leaves none); raise the maximal
    length; draw groups with different rewards.

    ## Options
    None.

    ## References
    None.
    """
    refused = refusal(run, "norm", "num_gradients")
    if refused:
        return Unknown(reason=refused)
    numbers = sorted({s.number for r in run.ranks for s in r.steps if _is_empty(s)})
    # A gradient that lives on another rank's shard is not nothing.
    numbers = [n for n in numbers if all(_is_empty(s) for _, s in steps_at(run, n))]
    lost = [n for n in numbers if any(_had_gradient(s) for _, s in steps_at(run, n))]
    empty = [n for n in numbers if n not in set(lost)]
    findings = [_finding(run, group, is_lost=group is lost) for group in (empty, lost) if group]
    absent = sorted({s.number for r in run.ranks for s in r.steps if _is_absent(s)})
    absent = [n for n in absent if all(_is_absent(s) for _, s in steps_at(run, n))]
    if absent:
        findings.append(_absent_finding(run, absent))
    findings += _unbroken(run, {*empty, *absent})
    findings += _dropped(run)
    power = Power(quantity="steps with gradients of exactly zero", smallest_detectable=1, unit="steps")
    return answer(findings, power=power, reason=looked_at(run))


def _dropped(run: RunRecord) -> list[Finding]:
    """Backwards that no step used. One before every step is how sharpness-aware optimizers and gradient penalties work."""
    findings = []
    for record in run.ranks:
        with_dropped = [s for s in record.steps if s.num_dropped]
        if not with_dropped or all(s.num_dropped == 1 for s in record.steps):
            continue
        total = sum(s.num_dropped for s in with_dropped)
        findings.append(
            Finding(
                message=f"the gradients of {counted(total, 'backward')} were set to None before any step used them (before "
                f"{_named([s.number for s in with_dropped])}; {counted(len(record.steps), 'step')} in all): batches that the loop "
                "leaves out, zero_grad inside of an accumulation, or a backward for something else than training. If they were to "
                "train the model, call zero_grad once for each step.",
                where=Where(step=with_dropped[0].number, rank=record.facts.rank),
                measured=Quantity(value=total, unit="backwards without a step"),
                expected=Quantity(value=0, unit="backwards without a step"),
            )
        )
    return findings


def _unbroken(run: RunRecord, numbers: set[int]) -> list[Finding]:
    """Where the run stopped learning for long. Told at the step in which that is certain: its first one has the note."""
    for record, stretch in all_stretches(run):
        for start, stop in long_runs(stretch, [s.number in numbers for s in stretch.steps], MANY_IN_A_ROW):
            first, certain = stretch.steps[start], stretch.steps[start + MANY_IN_A_ROW - 1]
            return [
                Finding(
                    message=f"nothing was learnt in {counted(stop - start, 'step')} in a row, from step {first.number} on: not one "
                    "gradient was other than zero. Whatever empties these batches (see the note), every further step is spent for "
                    "nothing: stop the run and look at the batch and at the loss.",
                    where=Where(step=certain.number, rank=record.facts.rank),
                    measured=Quantity(value=stop - start, unit="steps in a row"),
                    expected=Quantity(value=MANY_IN_A_ROW - 1, unit="steps in a row, at most"),
                    severity=Severity.WARNING,
                )
            ]
    return []


def _is_empty(step: Step) -> bool:
    is_zero = 0 < step.num_gradients == step.num_zero_before and was_taken(step)
    return is_zero and (step.loss is None or math.isfinite(step.loss))


def _is_absent(step: Step) -> bool:
    """No tensor had a gradient at any time, and no weight moved."""
    has_norm = step.num_gradients or step.norm is not None or step.norm_after is not None
    return step.outcome is StepOutcome.STEPPED and not has_norm and step.moved == 0


def _had_gradient(step: Step) -> bool:
    """At the output of an input table, where it is seen before any parameter has it."""
    return any(r.gradient_norm != 0 for r in step.rows)


def _finding(run: RunRecord, numbers: list[int], *, is_lost: bool) -> Finding:
    rank, step = next((r.facts.rank, s) for r, s in steps_at(run, numbers[0]))
    total = max(len(r.steps) for r in run.ranks)
    if is_lost:
        cause = (
            "although a gradient reached the input table's output: something set them to zero after backward (a zero_grad between "
            "backward and clipping), or a hook masks them. Call zero_grad before backward or after step."
        )
    else:
        cause = (
            f"as backward left them (loss {_losses(run, numbers)}): {_cause(run, numbers)}. To tell these apart, count the labels "
            "of the batches that are not -100, or look at the rewards of their groups."
        )
    severity = None
    if is_lost and len(numbers) >= LEAST_LOST:  # a few are how a loop leaves a bad batch out
        severity = Severity.ERROR if 2 * len(numbers) >= total else Severity.WARNING if 10 * len(numbers) >= total else None
    return Finding(
        severity=severity,
        message=f"every gradient was exactly zero in {counted(len(numbers), 'step')} of {total} ({_named(numbers)}), {cause}"
        f"{cost_text(run, numbers)}",
        where=Where(step=step.number, rank=rank, parameter=step.rows[0].table if is_lost and step.rows else None),
        measured=Quantity(value=len(numbers), unit="steps"),
        expected=Quantity(value=0, unit="steps"),
    )


def _absent_finding(run: RunRecord, numbers: list[int]) -> Finding:
    total = max(len(r.steps) for r in run.ranks)
    rank = next(r.facts.rank for r, _ in steps_at(run, numbers[0]))
    return Finding(
        message=f"not one parameter had a gradient in {counted(len(numbers), 'step')} of {total} ({_named(numbers)}), and no weight "
        "moved: backward did not reach this model there (a detached loss, another model's turn), or the gradients were cleared "
        "between backward and step. An optimizer that is shared with another model looks the same."
        f"{cost_text(run, numbers)}",
        where=Where(step=numbers[0], rank=rank),
        measured=Quantity(value=len(numbers), unit="steps"),
        expected=Quantity(value=0, unit="steps"),
    )


def _named(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:MOST_NUMBERS])) + (", ..." if len(numbers) > MOST_NUMBERS else "")
    return f"{'step' if len(numbers) == 1 else 'steps'} {shown}"


def _losses(run: RunRecord, numbers: list[int]) -> str:
    seen = [s.loss for n in numbers for _, s in steps_at(run, n) if s.loss is not None]
    if not seen:
        return "not seen"
    low, high = min(seen) + 0.0, max(seen) + 0.0  # -0.0 reads as 0
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _cause(run: RunRecord, numbers: list[int]) -> str:
    """What gradients of exactly zero can come from, by the loss."""
    if all(s.loss in (0, None) for n in numbers for _, s in steps_at(run, n)):
        return (
            "no label was left in the batch and the loss guards itself against 0 / 0, or all rewards of a group were equal, or every "
            "margin was kept"
        )
    return (
        "the loss does not depend on the weights there: all rewards of a group were equal beside a constant term, a weight of 0, "
        "a unit that is dead or saturated, or a gradient that is too small for its format"
    )
