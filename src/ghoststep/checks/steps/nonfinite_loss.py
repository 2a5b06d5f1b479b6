"""GS417."""

import math

from ghoststep.evidence.training import LiveWiring
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, Unknown, answer, check


@check(code="GS417", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("skipped-by-scaler", "unchanged-weights"))
def nonfinite_loss(wiring: LiveWiring) -> Answer:
    """The loss of the first batch is NaN or infinite.

    ## What it finds
    One run of the user's own loss on the first batch, as it is, without a loss scale.

    ## Why it matters
    Its gradients are NaN: the step writes NaN into every weight, a scaler skips it, or a guard drops it without a word. The first
    batch is no outlier: what happens on it will happen again.

    ## When it is not a problem
    Never for a loss that is stepped on. A cause that is found by itself (a NaN weight, a batch in which nothing is supervised,
    an attention row that hides everything) takes this finding as its symptom.

    ## How to confirm by hand
    `loss_fn(model, batch)`; with hooks on every module, the first output that is not finite.

    ## How to fix
    The usual sources: a mean over no position (all labels ignored), log or division by zero, a mask that hides everything, fp16
    values above 65,504.

    ## Options
    None.

    ## References
    None.
    """
    if wiring.gradient_reason and not math.isfinite(wiring.loss):
        return Unknown(reason=wiring.gradient_reason)
    findings = []
    if not math.isfinite(wiring.loss):
        findings.append(
            Finding(
                message=f"the loss of the first batch is {wiring.loss:g}: its gradients are not numbers, and a step would write "
                "that into every weight. Look for a mean over no position, a log or division by zero, a mask that hides "
                "everything, or fp16 values that overflow.",
                where=Where(),
                measured=Quantity(value=wiring.loss, unit="loss"),
            )
        )
    power = Power(quantity="a loss that is not finite", smallest_detectable=1, unit="batches")
    return answer(findings, power=power, reason=f"loss {wiring.loss:.4g}")
