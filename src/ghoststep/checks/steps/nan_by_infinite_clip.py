"""GS403."""

import math

from ghoststep.evidence.steps import RunRecord, Step, StepOutcome
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.step_findings import Place, by_row, is_nan_clipped, looked_at, refusal, steps_at
from ghoststep.step_texts import place_text, place_where, row_text


@check(
    code="GS403",
    severity=Severity.ERROR,
    basis=Basis.PROOF,
    explains_anywhere=("hidden-nan-loss", "nonfinite-gradient", "unchanged-weights", "skipped-by-scaler", "loss-spike"),
)
def nan_by_infinite_clip(run: RunRecord) -> Answer:
    """Clipping turned finite gradients into NaN.

    ## What it finds
    Steps whose gradients were finite in every tensor before clipping and NaN in (nearly) all of them when the optimizer stepped.
    The usual cause: `clip_grad_norm_(parameters, inf)`, called only to get the norm, while the norm overflows: inf / inf is NaN.
    The table row whose gradient made it overflow is named, with its place.

    ## Why it matters
    The optimizer writes NaN into every weight; the model is gone from this step on. Some trainers call it this way for
    `max_grad_norm=0`, and log the NaN loss as 0.0.

    ## When it is not a problem
    Never for a step that is taken. A norm that is finite does not do it, however large.

    ## How to confirm by hand
    `torch.nn.utils.clip_grad_norm_` on a gradient of 1e20 with max_norm `inf`, then look at the gradient.

    ## How to fix
    A finite bound (`max_grad_norm=1.0`), or `ghoststep.clip_grad_norm_(model, math.inf)`, which only measures. Go back to a checkpoint
    from before this step.

    ## Options
    None.

    ## References
    transformers' Trainer (5.24) with max_grad_norm=0; torch.nn.utils.clip_grad_norm_.
    """
    refused = refusal(run, "num_nonfinite_after", "num_nonfinite_before", "norm_after")
    if refused:
        return Unknown(reason=refused)
    lost = {s.number for r in run.ranks for s in r.steps if s.num_nonfinite_after and is_nan_clipped(s)}
    findings = []
    if lost:
        first = min(lost)
        (place,) = (group[0][1] for group in by_row(run, [first]).values())
        findings.append(_finding(run, first, place, len(lost)))
    power = Power(quantity="steps whose gradients became NaN between backward and step", smallest_detectable=1, unit="steps")
    return answer(findings, power=power, reason=looked_at(run))


def _finding(run: RunRecord, number: int, place: Place | None, num_steps: int) -> Finding:
    record, step = next((r, s) for r, s in steps_at(run, number) if is_nan_clipped(s))
    norm = max((s.norm for _, s in steps_at(run, number) if s.norm is not None), default=math.nan)
    who = ""
    if place is not None:
        who = f"{row_text(run, place)} got a gradient of {place.row.gradient_norm:.3g} at {place_text(place)}; "
    skipped = step.outcome is StepOutcome.SKIPPED_BY_POLICY
    end = (
        "ghoststep skipped the step before it was written into the weights"
        if skipped
        else "every weight that trains is NaN since"
    )
    again = f" It happened in {counted(num_steps, 'step')}." if num_steps > 1 else ""
    return Finding(
        message=f"{who}{_cause(step, norm)} and made {step.num_nonfinite_after} of {counted(step.num_gradients, 'gradient tensor')} "
        f"NaN in step {number}, all of them finite before: {end}.{again} Give the clip a finite bound, or measure with "
        "ghoststep.clip_grad_norm_(model, math.inf), and go on from a checkpoint of before.",
        where=place_where(run, place) if place is not None else Where(step=number, rank=record.facts.rank),
        measured=Quantity(value=step.num_nonfinite_after, unit="gradient tensors made NaN"),
        expected=Quantity(value=0, unit="gradient tensors made NaN"),
        severity=Severity.WARNING if skipped else Severity.ERROR,
        remedy="ghoststep.clip_grad_norm_",
    )


def _cause(step: Step, norm: float) -> str:
    bound = "" if step.clip_bound is None else f" to a bound of {step.clip_bound:g}"
    if norm == math.inf:
        ratio = "inf / inf is NaN" if step.clip_bound in (None, math.inf) else "the coefficient became NaN"
        return f"the float32 norm of all gradients overflowed to inf; clipping{bound} multiplied them by it ({ratio})"
    shown = "not seen" if math.isnan(norm) else f"{norm:.3g}"
    return (
        f"something between backward and the optimizer's step, such as clipping{bound}, multiplied them by NaN (norm {shown})"
    )
