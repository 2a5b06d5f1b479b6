"""GS010."""

from ghoststep.evidence.loss import LossKind, LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check


@check(code="GS010", severity=Severity.ERROR, basis=Basis.PROOF)
def masked_classes_in_smoothing(xray: LossXray, *, smallest_mass: float = 1e-6) -> Answer:
    """Label smoothing gives target mass to classes that are masked out of the softmax.

    ## What it finds
    Sum over masked classes v (probability exactly 0: logits of -inf or a large negative number) of the target distribution
    y[b, t, v], averaged over the loss's weight.

    ## Why it matters
    Cross-entropy with mass on a class of probability 0 is infinite (or, with a finite mask, thousands): the loss is inf or
    is ruled by a constant, reported numbers are useless, and the skipped or clipped step may look healthy.

    ## When it is not a problem
    Smoothing over the remaining classes only; masked classes that were cut off before the loss instead of set to -inf.

    ## How to confirm by hand
    `F.cross_entropy(logits, labels, label_smoothing=0.1)` is inf with masked logits and finite without smoothing.

    ## How to fix
    Cut the columns off (`logits[..., :num_tokens]`) before the loss, or smooth over the unmasked classes by hand.

    ## Options
    `smallest_mass`: mass on masked classes that is accepted, 1e-6.

    ## References
    None.
    """
    if xray.masked_classes == 0:
        return NotApplicable(reason="no class is masked out of the softmax")
    power = Power(quantity="target mass on masked classes", smallest_detectable=smallest_mass)
    if xray.smoothing_on_masked <= smallest_mass:
        return answer((), power=power, reason=f"{xray.masked_classes} masked classes, without target mass")
    who = "label smoothing puts" if xray.kind is not LossKind.HARD else "labels put"
    return answer(
        [
            Finding(
                message=f"{who} {xray.smoothing_on_masked:.2%} of the target on {xray.masked_classes} classes that are "
                f"masked out of the softmax (the first is {xray.first_masked_class}): the loss is {xray.loss:.4g}. Cut these "
                "columns off before the loss instead of masking them.",
                where=Where(token_id=xray.first_masked_class),
                measured=Quantity(value=xray.smoothing_on_masked, unit="target mass"),
                expected=Quantity(value=0, unit="target mass"),
                remedy="logits = logits[..., :num_tokens]",
            )
        ]
    )
