"""GS201."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.influence import Influence, Region
from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.label_shift import MIN_COUNTING, Beside, measure_shift, no_answer, points_back, too_few
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(
    code="GS201",
    severity=Severity.ERROR,
    basis=Basis.MEASURED,
    explains_anywhere=("visible-target", "padding-in-loss", "prompt-in-loss", "unsupervised-stop-token", "truncated-answers"),
)
def unshifted_labels(
    xray: LossXray, batch: BatchFacts, influence: Influence | Missing, *, minimum_share: float = 0.5
) -> Answer:
    """Each position is trained to predict its own token, or the one before it, which it sees.

    ## What it finds
    target[b, t] = ids[b, t], or = ids[b, t-1], at most positions that carry loss, [B, T], where target is the class that the gradient
    of the user's own loss pulls towards. Only positions where the tokens around them differ count.

    ## Why it matters
    The model learns to copy its input: the loss falls within a few steps far below what language allows, and generation repeats
    the last token for ever.

    ## When it is not a problem
    Masked language models and text diffusion: where the label is a position's own token, the input there is a mask token. Models
    that look both ways are judged by visible-target instead. Kept tokens (10 % in BERT's recipe) are far under one half.

    ## How to confirm by hand
    After a few steps `logits.argmax(-1) == input_ids` almost everywhere.

    ## How to fix
    Shift once: `F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())`; or pass `labels=input_ids` to a class
    that shifts by itself and use its loss; or use `ghoststep.lm_loss`.

    ## Options
    `minimum_share`: part of the counting positions that must point at their own token, 0.5 by default. Correct labels give
    about 0, masked-LM recipes 0.1.

    ## References
    Shares measured on planted faults and their healthy twins.
    """
    refused = no_answer(xray)
    if refused:
        return Unknown(reason=refused)
    if isinstance(influence, Influence) and not influence.is_causal_by_measure:
        return NotApplicable(reason="the model looks both ways: visible-target judges whether it sees what it predicts")
    back = points_back(xray, batch)
    if back.is_most(minimum_share):
        return answer([_backwards(back)])
    shift = measure_shift(xray, batch)
    if shift.num_counting < MIN_COUNTING:
        return Unknown(reason=too_few(shift))
    if shift.offset != 0 or shift.first is None or shift.share(0) < minimum_share:
        power = Power(quantity="share of positions pointing at their own token", smallest_detectable=minimum_share)
        return answer((), power=power, reason=f"{shift.matches[0]} of {shift.num_counting} positions point at their own token")
    example, position = shift.first
    token = int(batch.ids_BT[example, position])
    seen = influence.readings.get(Region.SELF) if isinstance(influence, Influence) else None
    proof = f"; the output there moves by {seen.absolute:.2g} when that token changes" if seen is not None else ""
    return answer(
        [
            Finding(
                message=f"labels are not shifted: position {position} of example {example} is trained to predict token {token}, "
                f"which is the token it sees ({shift.matches[0]} of {shift.num_counting} positions{proof}). The model learns to "
                "copy. Compare logits[:, :-1] with labels[:, 1:], or pass labels=input_ids to a class that shifts, or use "
                "ghoststep.lm_loss.",
                where=Where(example=example, position=position, token_id=token),
                measured=Quantity(value=round(shift.share(0), 4), unit="share of positions"),
                expected=Quantity(value=0, unit="share of positions"),
                remedy="F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
            )
        ]
    )


def _backwards(back: Beside) -> Finding:
    example, position = back.first or (0, 0)
    return Finding(
        message=f"labels are shifted the wrong way: position {position} of example {example} is trained to predict token {back.token}, "
        f"which stands before it at position {position - 1}, where it sees it ({back.matches} of {back.num_counting} positions). The "
        "model learns to copy and never to predict what comes next. Compare logits[:, :-1] with labels[:, 1:], or pass "
        "labels=input_ids to a class that shifts, or use ghoststep.lm_loss.",
        where=Where(example=example, position=position, token_id=back.token),
        measured=Quantity(value=round(back.matches / back.num_counting, 4), unit="share of positions"),
        expected=Quantity(value=0, unit="share of positions"),
        remedy="F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
    )
