"""GS405."""

import math

from ghoststep.evidence.base import Missing
from ghoststep.evidence.steps import RunRecord, Step, StepOutcome
from ghoststep.evidence.training import Gradient, LiveWiring
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted, listed
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check
from ghoststep.step_comparison import not_compared
from ghoststep.step_findings import NO_RUN, Place, looked_at, of_either, others_unseen, refusal, steps_at, was_taken
from ghoststep.step_texts import place_text, place_where, row_text


@check(
    code="GS405",
    severity=Severity.ERROR,
    basis=Basis.PROOF,
    explains_anywhere=("skipped-by-scaler", "unchanged-weights", "hidden-nan-loss"),
)
def nonfinite_gradient(wiring: LiveWiring | Missing, run: RunRecord | Missing = NO_RUN) -> Answer:
    """Gradients of a finite loss are infinite or NaN.

    ## What it finds
    Of a setup: parameters whose gradient holds inf or NaN after one backward of the loss on the first batch, without a loss scale.
    Of a run: the first step that was taken although gradients held inf or NaN before any clipping and the loss was finite. Where some
    places of the batch got a finite gradient at the embedding's output and others did not, the others are named: token, table row,
    example and position.

    ## Why it matters
    One such value makes the global gradient norm inf or NaN: clipping then zeroes or poisons every other gradient, a loss scaler
    skips the step, and without either the weights become NaN.

    ## When it is not a problem
    Overflows of a scaled fp16 loss in the first steps: the scaler lowers its scale. They are not looked at here. Steps that
    `ghoststep.clip_grad_norm_` put right.

    ## How to confirm by hand
    `loss.backward()`, then the names where `not p.grad.isfinite().all()`.

    ## How to fix
    The usual sources: division by a norm or length of zero, log or sqrt at zero, a row of the attention mask that hides
    everything, near-zero input rows, fp16 without a scaler.

    ## Options
    None.

    ## References
    None.
    """
    return of_either(
        wiring if isinstance(wiring, Missing) else lambda: _of_setup(wiring),
        run if isinstance(run, Missing) else lambda: _of_run(run),
    )


def _of_setup(wiring: LiveWiring) -> Answer:
    if wiring.gradient_reason:
        return Unknown(reason=wiring.gradient_reason)
    reached = [p for p in wiring.parameters if p.gradient not in (None, Gradient.FROZEN, Gradient.NONE)]
    if not reached:
        return NotApplicable(reason="no parameter got a gradient")
    if not math.isfinite(wiring.loss):
        return Unknown(reason=f"the loss itself is {wiring.loss:g} on the first batch: its gradients follow from that")
    bad = [p for p in reached if p.gradient is Gradient.NONFINITE]
    findings = []
    if bad:
        value = "NaN" if any(math.isnan(p.gradient_norm) for p in bad) else "inf"
        where = "every parameter" if len(bad) == len(reached) else f"{len(bad)} of {counted(len(reached), 'parameter')}"
        findings.append(
            Finding(
                message=f"the gradients of {where} ({listed([p.name for p in bad])}) hold {value} although the loss is finite "
                f"({wiring.loss:.4g}): the global gradient norm is {value}, and clipping, scaler or weights go with "
                "it. Look for a division by "
                "zero, a log or sqrt at zero or a fully hidden attention row near the last of them in the forward order.",
                where=Where(parameter=bad[0].name),
                measured=Quantity(value=len(bad), unit="parameters with a non-finite gradient"),
                expected=Quantity(value=0, unit="parameters with a non-finite gradient"),
            )
        )
    power = Power(quantity="parameters with a non-finite gradient", smallest_detectable=1, unit="parameters")
    return answer(findings, power=power, reason=f"{counted(len(reached), 'gradient')} looked at")


def _of_run(run: RunRecord) -> Answer:
    refused = refusal(run, "num_nonfinite_before", "norm")
    if refused:
        return Unknown(reason=refused)
    bad = sorted({s.number for r in run.ranks for s in r.steps if s.num_nonfinite_before and _is_bad(s)})
    bad = [n for n in bad if all(s.loss is None or math.isfinite(s.loss) for _, s in steps_at(run, n))]
    power = Power(quantity="parameters with a non-finite gradient", smallest_detectable=1, unit="parameters")
    left_out = not_compared(run, (), is_compared=_is_judged)
    reason = f"{looked_at(run)}{left_out.note}"
    return answer([_first_of_run(run, bad)] if bad else (), power=power, reason=reason, undecided=left_out.undecided)


def _is_judged(step: Step) -> bool:
    """Its gradients were finite, or their fault cannot be the loss's or the loss scale's."""
    return not step.num_nonfinite_before or (was_taken(step) and (step.loss is None or math.isfinite(step.loss)))


def _is_bad(step: Step) -> bool:
    return was_taken(step) and not step.clip_action and (step.loss is None or math.isfinite(step.loss))


def _first_of_run(run: RunRecord, numbers: list[int]) -> Finding:
    here = [(r, s) for r, s in steps_at(run, numbers[0]) if s.num_nonfinite_before]
    record, step = max(here, key=lambda pair: pair[1].num_nonfinite_before)
    guilty = [(r, s) for r, s in here if any(not math.isfinite(row.gradient_norm) for row in s.rows)]
    if len(guilty) == 1:  # before the reduction only that rank's were not finite
        ((record, step),) = guilty
    places = _isolated(record.facts.rank, step)
    where = Where(parameter=next(iter(step.nonfinite_before), None), step=step.number, rank=record.facts.rank)
    loss = "" if step.loss is None else f" ({step.loss:.4g})"
    whose = "this rank's loss" if others_unseen(run) else "the loss"
    names = ", ".join(step.nonfinite_before[:3]) + (", ..." if step.num_nonfinite_before > 3 else "")
    if step.outcome is StepOutcome.SKIPPED_BY_POLICY:
        then, severity = "ghoststep skipped the step", Severity.WARNING
    elif step.norm_after is not None and step.num_nonfinite_after == 0:
        is_lost = step.num_zero_after == step.num_gradients
        left = ", and every gradient was exactly zero then" if is_lost else ""
        then, severity = f"something took them out before the optimizer stepped{left}", Severity.WARNING
    elif step.num_nonfinite_after:
        then, severity = "the optimizer stepped on them", Severity.ERROR
    else:
        then, severity = "whether they were still there when the optimizer stepped is not seen", Severity.ERROR
    again = f", and in {counted(len(numbers) - 1, 'step')} after it" if len(numbers) > 1 else ""
    return Finding(
        message=f"the gradients of {step.num_nonfinite_before} of {counted(step.num_gradients, 'parameter')} ({names}) held inf or "
        f"NaN in step {step.number}{again}, although {whose} was finite{loss}: {then}.{_places_text(run, step, places)} "
        "Look for a division by zero, a log or sqrt at zero, a fully hidden attention row or a near-zero table row in that batch"
        f"{'; go on from a checkpoint of before' if severity is Severity.ERROR else ''}.",
        where=place_where(run, places[0]) if places else where,
        measured=Quantity(value=step.num_nonfinite_before, unit="parameters with a non-finite gradient"),
        expected=Quantity(value=0, unit="parameters with a non-finite gradient"),
        severity=severity,
    )


def _isolated(rank: int, step: Step) -> list[Place]:
    """Places of the batch whose gradient is not finite beside places whose gradient is; none where no place stands out.

    Kept are the places with the largest gradients, and NaN counts as largest: a finite one among them says that every place
    that is not finite was kept.
    """
    bad = [row for row in step.rows if not math.isfinite(row.gradient_norm)]
    return [Place(rank, step, row) for row in bad] if len(bad) < len(step.rows) else []


def _places_text(run: RunRecord, step: Step, places: list[Place]) -> str:
    if not step.rows:
        return ""
    if all(not math.isfinite(row.gradient_norm) for row in step.rows):
        return " No place of the batch stands out: the gradient at each one that was kept is not finite."
    if not places:
        if others_unseen(run):
            return (
                " At the embedding's output the gradient was finite at every place that this rank fed: another rank's batch may have "
                "done it. Look at the records of all ranks together."
            )
        return " At the embedding's output the gradient was finite at every place of the batch."
    first = places[0]
    also = ""
    for p in places[1:]:
        is_same = (p.row.table, p.row.token_id) == (first.row.table, first.row.token_id)
        also += f", and {'' if is_same else row_text(run, p) + ' '}at position {p.row.position} of example {p.row.example}"
        also += f" (micro-batch {p.row.micro_batch})" if p.row.micro_batch != first.row.micro_batch else ""
    text = row_text(run, first)
    text = f"{text[:1].upper()}{text[1:]} got a gradient of {first.row.gradient_norm:g} at {place_text(first)}{also}"
    return f" {text}; other places of the batch got a finite one."
