"""GS405."""

import math

from ghoststep.evidence.training import Gradient, LiveWiring
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted, listed
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS405", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("skipped-by-scaler", "unchanged-weights"))
def nonfinite_gradient(wiring: LiveWiring) -> Answer:
    """Gradients of a finite loss are infinite or NaN.

    ## What it finds
    Parameters whose gradient holds inf or NaN after one backward of the loss on the first batch, without a loss scale.

    ## Why it matters
    One such value makes the global gradient norm inf or NaN: clipping then zeroes or poisons every other gradient, a loss scaler
    skips the step, and without either the weights become NaN.

    ## When it is not a problem
    Overflows of a scaled fp16 loss in the first steps: the scaler lowers its scale. They are not looked at here.

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
