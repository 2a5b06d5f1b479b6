"""GS404."""

import math

from ghoststep.evidence.steps import RankRecord, RunRecord, Step, StepOutcome
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.step_comparison import not_compared
from ghoststep.step_findings import is_sharded, looked_at, others_unseen, refusal

MANY = 20
"""Steps with a NaN loss from which this is no accident, though each was skipped or left the weights as they were."""


@check(code="GS404", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("skipped-by-scaler", "unchanged-weights"))
def hidden_nan_loss(run: RunRecord) -> Answer:
    """The loss of training steps is NaN or infinite, whatever the log says.

    ## What it finds
    Steps whose loss is NaN or infinite: the first, and how many, and whether the optimizer was given gradients that are not finite.
    What is seen under a loss scaler is the loss times its scale. Where that is infinite at a scale above 1 and the scaler skipped the
    step, or every gradient was finite, the loss itself may be an ordinary number: such steps are only counted.

    ## Why it matters
    As a rule its gradients are NaN and the step writes them into the weights. Where none that the optimizer was given was NaN or
    infinite (torch's cross-entropy over a batch in which every label is ignored) this is a warning: the batch teaches nothing, while
    momentum and decay move the weights on. A trainer may show nothing: transformers replaces a NaN loss in its log by the running mean
    (`logging_nan_inf_filter`), which reads 0.0 from then on.

    ## When it is not a problem
    Never for a step that is taken. A cause that is found by itself (nan-by-infinite-clip, nonfinite-gradient) takes this finding
    as its symptom.

    ## How to confirm by hand
    `logging_nan_inf_filter=False`, or print the loss.

    ## How to fix
    Go back to a checkpoint from before the named step and look at its batch: no position supervised (a mean over nothing), a mask
    that hides everything, fp16 values that overflow, log or division by zero.

    ## Options
    None.

    ## References
    transformers.TrainingArguments, `logging_nan_inf_filter` (on by default).
    """
    refused = refusal(run, "loss")
    if refused:
        return Unknown(reason=refused)
    bad, num_hidden = [], 0
    for record in run.ranks:
        for step in record.steps:
            if step.loss is None or step.loss - step.loss == 0:
                continue
            if _may_be_the_scale(step):
                num_hidden += 1
            else:
                bad.append((record, step))
    findings = [_finding(run, bad)] if bad else []
    power = Power(quantity="steps with a loss that is not finite", smallest_detectable=1, unit="steps")
    if not num_hidden:
        return answer(findings, power=power, reason=looked_at(run))
    left_out = not_compared(run, ("loss",), is_compared=lambda s: not _may_be_the_scale(s))
    return answer(findings, power=power, reason=f"{looked_at(run)}{left_out.note}", undecided=left_out.undecided)


def _may_be_the_scale(step: Step) -> bool:
    """The loss times its scale overflowed: a loss of 2 in fp16 does so at 65536. Nothing recorded tells whether the loss itself had."""
    loss, scale = step.loss, step.scale
    if loss is None or not math.isinf(loss):
        return False  # inf - inf of two micro-batches is NaN too, but so is a micro-batch without a label, which must be told
    if step.outcome is StepOutcome.SKIPPED_BY_SCALER:
        return scale is None or scale > 1
    return scale is not None and scale > 1 and not step.num_nonfinite_before and not step.num_nonfinite_after


def _finding(run: RunRecord, bad: list[tuple[RankRecord, Step]]) -> Finding:
    record, step = min(bad, key=lambda pair: (pair[1].number, pair[0].facts.rank))
    ranks = {r.facts.rank for r, _ in bad}
    numbers = {s.number for _, s in bad}
    spread = f" on {counted(len(ranks), 'rank')}" if len(run.ranks) > 1 else ""
    again = f" and in {counted(len(numbers), 'step')} in all" if len(numbers) > 1 or spread else ""
    harm = _harm(run, bad)
    place = f"Go back to a checkpoint from before step {step.number} and look" if harm else "Look"
    return Finding(
        message=f"the loss is {_value(step)} in step {step.number}{again}{spread}: {harm or _no_harm(bad)}. "
        f"A log may show 0.0 for it (transformers' logging_nan_inf_filter). {place} at the batch of step {step.number}: nothing "
        "supervised, everything hidden, an overflow, a division by zero.",
        where=Where(step=step.number, rank=record.facts.rank),
        measured=Quantity(value=len(numbers), unit="steps with a loss that is not finite"),
        expected=Quantity(value=0, unit="steps with a loss that is not finite"),
        severity=Severity.ERROR if harm or len(numbers) >= MANY else Severity.WARNING,
    )


def _harm(run: RunRecord, bad: list[tuple[RankRecord, Step]]) -> str:
    """What the optimizer was given that is not finite, or that this was not seen; "" if it was seen and finite."""
    taken = [(r, s) for r, s in bad if s.outcome is StepOutcome.STEPPED]
    given = [(r, s) for r, s in taken if s.num_nonfinite_after]
    if given:
        record, step = min(given, key=lambda pair: pair[1].number)
        last = record.steps[-1]
        if last.number == step.number or last.loss is None:
            since = ""
        elif math.isfinite(last.loss):
            since = f"; the loss is a number again in step {last.number}"
        else:
            since = f"; it still is {_value(last)} in step {last.number}"
        tensors = counted(step.num_gradients, "gradient tensor")
        return (
            f"the optimizer stepped on NaN or infinity in {step.num_nonfinite_after} of {tensors} in step {step.number}{since}"
        )
    if any(not _is_seen(run, r, s) for r, s in taken):
        return "whether the optimizer was given numbers is not seen here, and gradients of such a loss are none as a rule"
    return ""


def _is_seen(run: RunRecord, record: RankRecord, step: Step) -> bool:
    """Every gradient of this step, at the latest when the optimizer stepped, was looked at here and none was NaN or infinite."""
    if is_sharded(record) and others_unseen(run):
        return False
    return step.norm_after is not None or (step.norm is not None and not step.num_nonfinite_before)


def _no_harm(bad: list[tuple[RankRecord, Step]]) -> str:
    taken = [s for _, s in bad if s.outcome is StepOutcome.STEPPED]
    if not taken:
        by_scaler = any(s.outcome is StepOutcome.SKIPPED_BY_SCALER for _, s in bad)
        which = "it" if len(bad) == 1 else "each of them"
        return f"{'the loss scaler' if by_scaler else 'ghoststep'} skipped {which}, and nothing was written into the weights"
    is_zero = all(0 < s.num_gradients == s.num_zero_after for s in taken)
    what = (
        "every gradient that the optimizer was given was exactly zero"
        if is_zero
        else "the optimizer was given finite gradients"
    )
    if len(taken) < len(bad):
        what = f"skipped in {counted(len(bad) - len(taken), 'step')} of them; in the others {what}"
    moved = [s.moved for s in taken if s.moved is not None and math.isfinite(s.moved)]
    if not moved:
        return what
    if max(moved) == 0:
        return f"{what}, and the weights stood still"
    by = " (momentum and decay go on without a gradient)" if is_zero else ""
    how = "the step moved the weights by" if len(taken) == 1 else "such a step moved the weights by up to"
    return f"{what}; {how} {max(moved):.2g} of their norm{by}"


def _value(step: Step) -> str:
    return "NaN" if step.loss is None or math.isnan(step.loss) else f"{step.loss:g}"
