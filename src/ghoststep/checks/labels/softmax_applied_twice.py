"""GS212."""

import math

from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check

TOLERANCE = 0.01
"""Of the log odds: rounding in bfloat16 after a softmax."""


@check(code="GS212", severity=Severity.ERROR, basis=Basis.PROOF)
def softmax_applied_twice(xray: LossXray) -> Answer:
    """The loss takes a softmax of probabilities: softmax was applied before a loss that applies it again.

    ## What it finds
    A softmax over the classes between the logits and the log-softmax of the user's own loss, and with fed logits of 1e4 at every
    label and 0 elsewhere no two classes of a row come further apart than 1 in log-probability.

    ## Why it matters
    Probabilities lie in [0, 1], so the second softmax cannot be sharp: with V classes the loss never falls below
    ln(1 + (V - 1) / e), and gradients vanish once the first softmax is sure.

    ## When it is not a problem
    A logarithm between the two (log-probabilities may be normalised again); mixtures of softmaxes; label smoothing and capped logits,
    which leave floors of their own.

    ## How to confirm by hand
    `F.cross_entropy` and `nn.CrossEntropyLoss` take logits: nothing before them may have applied softmax.

    ## How to fix
    Give the loss the logits, or use `F.nll_loss(torch.log(probabilities), ...)`.

    ## Options
    None.

    ## References
    Documentation of torch.nn.CrossEntropyLoss.
    """
    if not xray.weight_BT.any():
        return Unknown(reason="no position carries loss, or the loss could not be read")
    if xray.reading.startswith("fed hidden states"):
        return NotApplicable(reason="the loss makes its logits from hidden states by itself: no softmax can stand before it")
    if xray.reading != "log-softmax node" and not xray.kind.is_likelihood:
        return Unknown(reason=f"the loss is {xray.kind.value}, without a log-softmax that could be looked at")
    reach = xray.log_odds_reached
    power = Power(quantity="difference of log-probabilities that logits reach", smallest_detectable=1 + TOLERANCE)
    if not reach <= 1 + TOLERANCE:
        reason = "no softmax stands before the loss's own" if math.isinf(reach) else f"logits of 1e4 come {reach:.3g} apart"
        return answer((), power=power, reason=reason)
    floor = math.log1p((xray.num_classes - 1) / math.e)
    return answer(
        [
            Finding(
                message=f"softmax is applied twice: the loss takes the softmax of what already went through one, and logits of 1e4 at "
                f"every label put its classes only {reach:.2f} apart. With {xray.num_classes} classes the loss cannot fall below "
                f"{floor:.2f} (a model that knows nothing has {math.log(xray.num_classes):.2f}). Give the loss the logits.",
                where=Where(),
                measured=Quantity(value=round(reach, 4), unit="difference of log-probabilities reached"),
                remedy="F.cross_entropy(logits, labels)  # no softmax before it",
            )
        ]
    )
