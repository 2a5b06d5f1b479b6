"""GS101."""

from ghoststep.evidence.influence import Influence
from ghoststep.finding import Basis, Finding, Severity, Where
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check
from ghoststep.visibility import NOTHING_EXPECTED, Seen, examples_mixed, judge, power_of, through_nothing, without_power


@check(
    code="GS101",
    severity=Severity.ERROR,
    basis=Basis.MEASURED,
    explains_anywhere=(
        "visible-target",
        "visible-padding",
        "visible-neighbour-document",
        "blind-context",
        "nothing-visible",
        "order-blind",
        "padding-side-changes-output",
        "attention-implementations-differ",
        "absent-mask-changes-output",
        "pack-changes-output",
    ),
)
def visible_future(influence: Influence) -> Answer:
    """A position that is trained to predict what comes next sees later tokens.

    ## What it finds
    For trained positions t and later tokens s > t of the same document: the change of the hidden state at t when the tokens
    from s on are replaced, and the gradient of that state at the embedding of s, both over what the own past does. Error above
    1e-3, warning above 1e-5 (swap, float32) or 1e-6 (gradient). A true decoder shows exactly 0.

    ## Why it matters
    The model reads the answer. The loss falls far below anything the data allows, validation too, and generation, where no
    future exists, is rubbish.

    ## When it is not a problem
    Encoders, masked-language models, a prefix before the trained positions, the encoder of an encoder-decoder, diffusion
    models: there the future is visible by design and not what a position is trained to predict. A finite mask of -1e4.

    ## How to confirm by hand
    Change the last token of `input_ids` and compare the logits at all earlier positions: they must be equal bit for bit.

    ## How to fix
    Combine the padding mask with the causal one (`padding[:, None, None, :] & torch.ones(T, T).tril().bool()`); with
    `scaled_dot_product_attention` an `attn_mask` replaces `is_causal`; a boolean mask there means True = visible; an encoder
    used as a decoder needs `is_decoder=True`; routing by capacity must serve earlier tokens first.

    ## Options
    None.

    ## References
    None.
    """
    swap, gradient = influence.trained_future, influence.trained_future_gradient
    if influence.intent.causal is False:
        return NotApplicable(reason=f"the future may be seen here: {influence.intent.source}")
    if swap is None and gradient is None:
        nothing = NotApplicable(reason="no trained position has a later token in its document")
        return (without_power(influence) if influence.reasons else None) or nothing
    seen = judge(swap, gradient, influence.floor)
    mixed = examples_mixed(influence)
    if mixed is not None:
        return mixed
    if seen is None:
        if influence.num_texts > 1:
            return Unknown(reason=f"{influence.num_texts} texts in one call: the future was looked at in the last one only")
        if influence.against_order:
            return Unknown(
                reason="routing serves later examples before earlier ones (GS105); a future was not seen to move a position, but "
                "whether a choice tips over is chance"
            )
        if influence.choice_unprobed:
            return Unknown(
                reason="a discrete choice among scores ran (expert routing), which no gradient shows, and --fast replaces too few "
                "tokens to see a later one tip an earlier one's choice: run without --fast"
            )
        return without_power(influence) or answer((), power=power_of(influence), reason=_figures(influence))
    if through_nothing(influence, seen):
        return Unknown(reason=f"later tokens are visible through positions without any visible key (GS107): {seen.proof}")
    if influence.intent.causal is None:
        return Unknown(
            reason=f"later tokens are visible ({seen.proof}), but {influence.intent.source}: say `intent` in the setup "
            '("causal", "masked", ...)'
        )
    return answer([_finding(influence, seen)])


def _finding(influence: Influence, seen: Seen) -> Finding:
    example, position = seen.reading.target
    discrete = seen.reading.method == "swap" and not (influence.trained_future_gradient or seen.reading).relative
    routed = (
        " No gradient flows that way: a discrete choice carries it (routing by capacity or by expert). Serve earlier tokens first."
        if discrete
        else " Combine the padding mask with a causal one (a mask passed to scaled_dot_product_attention replaces is_causal; "
        "True means visible there), or set is_decoder for an encoder that is used as a decoder."
    )
    return Finding(
        message=f"later tokens are visible to positions that must not see them ({influence.intent.source}): {seen.proof}. "
        "The loss falls because the answer is read, and generation has nothing to read." + routed,
        where=Where(example=example, position=position),
        measured=seen.measured,
        expected=NOTHING_EXPECTED,
        severity=seen.severity,
        remedy="mask the future for every trained position",
    )


def _figures(influence: Influence) -> str:
    readings = [r for r in (influence.trained_future, influence.trained_future_gradient) if r is not None]
    text = ", ".join(f"{r.relative:.2g} by {r.method} ({r.num_pairs} pairs)" for r in readings)
    return f"future over past: {text}; read at {influence.readout}"
