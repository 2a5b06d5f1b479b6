"""GS213."""

from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.label_shift import no_answer
from ghoststep.registry import Answer, Unknown, answer, check


@check(code="GS213", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("decay-on-frozen-rows",))
def scrambled_logits(xray: LossXray) -> Answer:
    """The loss compares each label with classes that belong to several positions: a reshape mixed time and classes.

    ## What it finds
    A gradient at single entries of one row of the loss's log-softmax arrives at entries of the logits [B, T, V] of other classes and
    of several positions.

    ## Why it matters
    No position is trained towards its label. The loss falls to the frequencies of tokens at best, and no shape error is raised.

    ## When it is not a problem
    Losses that average logits over positions or calls, and permuted or cut vocabularies: there classes keep their places, or more
    than one entry feeds each.

    ## How to confirm by hand
    `x.reshape(-1, V)` needs the classes last: look for a transpose or permute before it.

    ## How to fix
    `logits.flatten(0, 1)` on [B, T, V]; or hand [B, V, T] to `F.cross_entropy` as it is, with labels [B, T].

    ## Options
    None.

    ## References
    None.
    """
    if not xray.mixed_positions:
        # At a log-softmax every row was traced back to one position.
        refused = no_answer(xray, signed=True)
        if refused and xray.reading != "log-softmax node":
            return Unknown(reason=refused)
        return answer(
            (), power=Power(quantity="positions that feed a row of the loss", smallest_detectable=2, unit="positions")
        )
    return answer(
        [
            Finding(
                message="the logits are scrambled before the loss: the classes of one row of its softmax come from at least "
                f"{xray.mixed_positions} positions, and from other classes than their own. A transpose stands before a reshape to "
                "[-1, V]. Flatten [B, T, V] as it is.",
                where=Where(),
                measured=Quantity(value=xray.mixed_positions, unit="positions that feed a row of the loss, at least"),
                expected=Quantity(value=1, unit="positions that feed a row of the loss"),
                remedy="F.cross_entropy(logits.flatten(0, 1), labels.flatten())",
            )
        ]
    )
