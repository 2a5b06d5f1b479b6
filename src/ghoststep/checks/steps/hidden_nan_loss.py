"""GS404."""

import math

from ghoststep.evidence.steps import RunRecord, Step, StepOutcome
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.step_findings import looked_at, refusal

MANY = 20
"""Steps with a NaN loss from which this is no accident, though each was skipped or left the weights as they were."""


@check(code="GS404", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("skipped-by-scaler", "unchanged-weights"))
def hidden_nan_loss(run: RunRecord) -> Answer:
    """The loss of training steps is NaN or infinite, whatever the log says.

    ## What it finds
    Steps whose loss is NaN or infinite: the first, and how many. An infinite loss under a loss scaler that skipped the step is
    the scaler's own business.

    ## Why it matters
    As a rule its gradients are NaN and the step writes them into the weights; where they stayed finite (torch's cross-entropy over a
    batch in which every label is ignored) only the batch is lost: a warning. A trainer may show nothing: transformers replaces a
    NaN loss in its log by the running mean (`logging_nan_inf_filter`), which reads 0.0 from then on.

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
    bad = [(s.number, r.facts.rank, s) for r in run.ranks for s in r.steps if s.loss is not None and _is_bad(s)]
    findings = []
    if bad:
        number, rank, step = min(bad, key=lambda b: b[:2])
        ranks = sorted({r for _, r, _ in bad})
        numbers = {n for n, _, _ in bad}
        taken = any(s.outcome is StepOutcome.STEPPED for _, _, s in bad)
        spread = f" on {counted(len(ranks), 'rank')}" if len(run.ranks) > 1 else ""
        written = any(s.outcome is StepOutcome.STEPPED and _may_be_written(s) for _, _, s in bad)
        again = f" and in {counted(len(numbers), 'step')} in all" if len(numbers) > 1 or spread else ""
        if written:
            then = "its gradients are not numbers, and the step writes them into the weights"
        else:
            then = "its gradients were finite, so that the weights were spared" if taken else "each was skipped"
        findings.append(
            Finding(
                message=f"the loss is {_value(step)} in step {number}{again}{spread}: {then}. "
                "A log may show 0.0 for it (transformers' logging_nan_inf_filter). Go back to a checkpoint from before step "
                f"{number} and look at that batch: nothing supervised, everything hidden, an overflow, a division by zero.",
                where=Where(step=number, rank=rank),
                measured=Quantity(value=len(numbers), unit="steps with a loss that is not finite"),
                expected=Quantity(value=0, unit="steps with a loss that is not finite"),
                severity=Severity.ERROR if written or len(numbers) >= MANY else Severity.WARNING,
            )
        )
    power = Power(quantity="steps with a loss that is not finite", smallest_detectable=1, unit="steps")
    return answer(findings, power=power, reason=looked_at(run))


def _is_bad(step: Step) -> bool:
    loss = step.loss
    if loss is None or loss - loss == 0:
        return False
    return math.isnan(loss) or step.outcome is not StepOutcome.SKIPPED_BY_SCALER


def _may_be_written(step: Step) -> bool:
    return step.norm is None or not math.isfinite(step.norm) or step.num_nonfinite_before > 0 or step.num_nonfinite_after > 0


def _value(step: Step) -> str:
    return "NaN" if step.loss is None or math.isnan(step.loss) else f"{step.loss:g}"
