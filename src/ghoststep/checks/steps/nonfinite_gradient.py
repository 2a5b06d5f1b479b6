"""GS405."""

import math

from ghoststep.evidence.base import Missing
from ghoststep.evidence.steps import RunRecord, Step, StepOutcome
from ghoststep.evidence.training import Gradient, LiveWiring
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted, listed
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check
from ghoststep.step_findings import NO_RUN, looked_at, of_either, refusal, steps_at, was_taken


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
    Of a run: the first step that was taken although gradients held inf or NaN before any clipping and the loss was finite.

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
    return answer([_first_of_run(run, bad)] if bad else (), power=power, reason=looked_at(run))


def _is_bad(step: Step) -> bool:
    return was_taken(step) and not step.clip_action and (step.loss is None or math.isfinite(step.loss))


def _first_of_run(run: RunRecord, numbers: list[int]) -> Finding:
    here = [(r, s) for r, s in steps_at(run, numbers[0]) if s.num_nonfinite_before]
    record, step = max(here, key=lambda pair: pair[1].num_nonfinite_before)
    guilty = [r for r, s in here if any(not math.isfinite(row.gradient_norm) for row in s.rows)]
    record = guilty[0] if len(guilty) == 1 else record  # before the reduction only that rank's were not finite
    loss = "" if step.loss is None else f" ({step.loss:.4g})"
    names = ", ".join(step.nonfinite_before[:3]) + (", ..." if step.num_nonfinite_before > 3 else "")
    if step.outcome is StepOutcome.SKIPPED_BY_POLICY:
        then, severity = "ghoststep skipped the step", Severity.WARNING
    elif step.norm_after is not None and step.num_nonfinite_after == 0:
        then, severity = "something took them out before the optimizer stepped, so that the step was lost", Severity.WARNING
    else:
        then, severity = "the optimizer wrote them into the weights", Severity.ERROR
    again = f", and in {counted(len(numbers) - 1, 'step')} after it" if len(numbers) > 1 else ""
    return Finding(
        message=f"the gradients of {step.num_nonfinite_before} of {counted(step.num_gradients, 'parameter')} ({names}) held inf or "
        f"NaN in step {step.number}{again}, although the loss was finite{loss}: {then}. Look for a division by zero, a log or "
        "sqrt at zero, a fully hidden attention row or a near-zero table row in that batch; go on from a checkpoint of before.",
        where=Where(parameter=next(iter(step.nonfinite_before), None), step=step.number, rank=record.facts.rank),
        measured=Quantity(value=step.num_nonfinite_before, unit="parameters with a non-finite gradient"),
        expected=Quantity(value=0, unit="parameters with a non-finite gradient"),
        severity=severity,
    )
