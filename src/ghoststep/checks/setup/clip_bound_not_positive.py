"""GS610."""

import math

from ghoststep.evidence.training import ClipBound
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check


@check(
    code="GS610",
    severity=Severity.ERROR,
    basis=Basis.PROOF,
    explains_anywhere=("gradients-cleared-before-step", "unchanged-weights"),
)
def clip_bound_not_positive(bound: ClipBound) -> Answer:
    """The bound of gradient clipping is zero, negative or NaN.

    ## What it finds
    `max_grad_norm` ≤ 0 or NaN.

    ## Why it matters
    `torch.nn.utils.clip_grad_norm_` multiplies by bound / norm: 0 zeroes every gradient, a negative bound turns all of them
    around (the loss is climbed), NaN poisons them.

    ## When it is not a problem
    A trainer that takes 0 as "do not clip" and never hands it on: then leave the key out of the setup.

    ## How to confirm by hand
    The gradient norm before and after clipping.

    ## How to fix
    A bound above 0 (1.0 is usual), or no clipping (None or inf).

    ## Options
    None.

    ## References
    Measured with torch 2.13.
    """
    value = bound.max_grad_norm
    findings = []
    if math.isnan(value) or value <= 0:
        effect = (
            "turns every gradient to NaN"
            if math.isnan(value)
            else "sets every gradient to 0"
            if value == 0
            else "turns every gradient around"
        )
        findings.append(
            Finding(
                message=f"max_grad_norm is {value:g}: torch's clip_grad_norm_ multiplies by bound / norm, which "
                f"{effect}. Use a bound above 0, or "
                "None for no clipping.",
                where=Where(),
                measured=Quantity(value=value, unit="max_grad_norm"),
                remedy="max_grad_norm=1.0",
            )
        )
    return answer(
        findings, power=Power(quantity="bound", smallest_detectable=0.0, unit="L2 norm"), reason=f"max_grad_norm is {value:g}"
    )
