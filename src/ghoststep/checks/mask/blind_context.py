"""GS103."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.influence import Influence, Region
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check
from ghoststep.visibility import not_read, without_power

_NO_BATCH = Missing(reason="not there")


@check(
    code="GS103",
    severity=Severity.ERROR,
    basis=Basis.MEASURED,
    explains_anywhere=("order-blind", "attention-implementations-differ", "absent-mask-changes-output", "cache-changes-output"),
)
def blind_context(influence: Influence, batch: BatchFacts | Missing = _NO_BATCH) -> Answer:
    """Positions do not see the tokens right before them, although the model attends; or a masked model sees none behind.

    ## What it finds
    A batch, or an example of it, where no position that was looked at depends on the real tokens before it (neither by swap nor
    by gradient), in a model that runs attention. Parameters that are zero at initialisation are given values for the probe. With
    `intent="masked"`: no position that was looked at depends on a later token.

    ## Why it matters
    The model learns frequencies of single tokens and nothing of their context. The loss falls to the entropy of the unigram and
    stays there.

    ## When it is not a problem
    Sliding windows and chunked attention, which are blind to the far past and, at a chunk's first position, to all of it; models
    without attention or recurrence (bigram models).

    ## How to confirm by hand
    Change one token and compare the logits behind it: they must differ.

    ## How to fix
    Look for an inverted mask (True = visible for `scaled_dot_product_attention`, True = ignored for `nn.MultiheadAttention`), for
    a padding mask of the wrong polarity, and for a mask that stands over queries instead of keys.

    ## Options
    None.

    ## References
    None.
    """
    visible, looked = influence.near_past
    if not looked:
        nothing = NotApplicable(reason="no real position that was looked at has a token before it in its document")
        return (without_power(influence) if influence.reasons else None) or nothing
    if influence.blind_example is None:
        one_sided = _sees_only_the_past(influence, batch)
        if one_sided is not None:
            return answer([one_sided])
        left_out = not_read(influence)
        if left_out is not None:
            return left_out
        power = Power(quantity="positions blind to their past", smallest_detectable=1, unit="examples")
        return answer((), power=power, reason=f"{visible} of {looked} positions looked at see their past")
    if not influence.has_attention:
        if visible:
            return answer(
                (), undecided=f"{looked - visible} of {looked} positions see no past, and no attention was seen to run"
            )
        return NotApplicable(reason="no position sees any other and no attention ran: the model works position by position")
    example, position = influence.blind_example
    return answer(
        [
            Finding(
                message=f"position {position} of example {example} sees none of the tokens before it: replacing them moves nothing "
                f"and no gradient reaches them ({looked - visible} of {looked} positions looked at are blind). The model attends, so "
                "a mask hides the context: look for one of inverted meaning, or one over queries instead of keys.",
                where=Where(example=example, position=position),
                measured=Quantity(value=looked - visible, unit="blind positions"),
                expected=Quantity(value=0, unit="blind positions"),
                remedy="let every position see the real tokens before it",
            )
        ]
    )


def _sees_only_the_past(influence: Influence, batch: BatchFacts | Missing) -> Finding | None:
    """A declared masked model whose positions were seen to see their past, and none a later token."""
    if isinstance(batch, Missing) or batch.intent != "masked" or not influence.has_power:
        return None
    swap, gradient = influence.readings.get(Region.FUTURE), influence.gradient_readings.get(Region.FUTURE)
    if not influence.is_causal_by_measure or swap is None or gradient is None or not swap.num_pairs or gradient.absolute > 0:
        return None
    example, position = swap.target
    return Finding(
        message=f"the setup's intent is masked, but the model sees only what comes before: of {swap.num_pairs} later tokens that were "
        "replaced none moves a position, and no gradient reaches them. A hidden token is predicted from half of its context. Take "
        "the causal mask out (is_decoder=False, is_causal=False), or declare what is meant with intent.",
        where=Where(example=example, position=position),
        measured=Quantity(value=0, unit="later tokens seen"),
        expected=Quantity(value=swap.num_pairs, unit="later tokens seen"),
        remedy="no causal mask in a masked model",
    )
