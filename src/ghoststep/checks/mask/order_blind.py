"""GS108."""

from ghoststep.evidence.influence import Influence
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check
from ghoststep.visibility import examples_mixed, not_read


@check(code="GS108", severity=Severity.ERROR, basis=Basis.MEASURED)
def order_blind(influence: Influence) -> Answer:
    """The order of earlier tokens makes no difference: positions do not reach the model.

    ## What it finds
    Up to six tokens right before the last real position are read backwards; its hidden state moves no more than rounding
    allows, although replacing them moves it. Only in models that attend.

    ## Why it matters
    The model sees a bag of words. It trains, to a loss that looks low but reachable, and cannot tell "dog bites man" from the
    reverse.

    ## When it is not a problem
    Models that sum or average embeddings by design (no attention runs); causal models without position embeddings of two layers
    or more, which learn the order from the mask (their hidden state moves).

    ## How to confirm by hand
    Swap two tokens of `input_ids` and compare the last position's logits.

    ## How to fix
    Check that the position table is not zero, that it is added, that rotary angles are not all computed for position 0, and that
    `position_ids` are not all equal.

    ## Options
    None.

    ## References
    Measured: BERT with a zeroed position table moves by 6e-8, with positions by 7e-4.
    """
    if influence.order_change is None:
        return Unknown(
            reason="the order of tokens was not looked at (--fast, no example with two different tokens before its last, or "
            "replacing them moves nothing in the model as it is)"
        )
    if not influence.has_attention:
        return NotApplicable(reason="no attention operation was seen to run")
    power = Power(quantity="change by order over change by replacement", smallest_detectable=influence.order_floor)
    ratio = influence.order_change
    if ratio > influence.order_floor:
        return not_read(influence) or answer(
            (), power=power, reason=f"changing places moves {ratio:.2g} of what replacing does"
        )
    mixed = examples_mixed(influence)
    if mixed is not None:
        return mixed
    if influence.order_floor > 1e-2:
        return Unknown(reason=f"rounding alone reaches {influence.order_floor:.2g} of what replacing tokens does")
    return answer(
        [
            Finding(
                message="the model does not see the order of tokens: when tokens change places, the last position's hidden state "
                f"moves by {ratio:.2g} of what replacing them does (rounding reaches {influence.order_floor:.2g}). Positions do not "
                "reach the model: check the position table or rotary angles and `position_ids`.",
                where=Where(),
                measured=Quantity(value=ratio, unit="change by order over change by replacement"),
                remedy="give the model its positions",
            )
        ]
    )
