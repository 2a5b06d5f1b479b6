"""GS202."""

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.label_shift import MIN_COUNTING, Beside, all_shifts, beside_masks, no_answer, too_few
from ghoststep.registry import Answer, Unknown, answer, check

_MASKS_BESIDE = 0.6
"""Share of the trained positions beside a mask token: 0.8 of the chosen ones hold it in BERT's recipe, less those beside another."""


@check(
    code="GS202",
    severity=Severity.ERROR,
    basis=Basis.MEASURED,
    explains_anywhere=("padding-in-loss", "prompt-in-loss", "truncated-answers"),
)
def twice_shifted_labels(xray: LossXray, batch: BatchFacts, *, minimum_share: float = 0.5) -> Answer:
    """Labels are shifted once too often: each position predicts the token after the next one, or a mask token's neighbour does.

    ## What it finds
    target[b, t] = ids[b, t+2] at most positions that carry loss, [B, T], and no head predicts ids[b, t+1]. Only positions where
    ids at t, t+1 and t+2 differ count. In masked models (a warning): trained positions that hold an ordinary token while one and
    the same other token, the mask, stands right after (or right before) at least six tenths of them.

    ## Why it matters
    The data code shifts the labels and the model's loss shifts them again. The loss falls, but slowly and to a worse level, and
    generation skips every other token.

    ## When it is not a problem
    Multi-token prediction: a second head that predicts t+2 beside one that predicts t+1. Diffusion models made from causal ones
    predict a masked token at the position before it on purpose.

    ## How to confirm by hand
    Compare `labels` with `input_ids` in the batch: for a class that shifts by itself they must be equal where not -100.

    ## How to fix
    Shift in one place only: pass `labels=input_ids` to a class that shifts.

    ## Options
    `minimum_share`: part of the counting positions that must point two ahead, 0.5 by default.

    ## References
    Shares measured on planted faults and their healthy twins.
    """
    refused = no_answer(xray)
    if refused:
        return Unknown(reason=refused)
    for step in (1, -1):
        beside = beside_masks(xray, batch, step)
        if beside.is_most(_MASKS_BESIDE):
            return answer([_beside(beside, step)])
    shifts = all_shifts(xray, batch)
    main = max(shifts, key=lambda s: s.num_counting)
    if main.num_counting < MIN_COUNTING:
        return Unknown(reason=too_few(main))
    power = Power(quantity="share of positions pointing two tokens ahead", smallest_detectable=minimum_share)
    if any(s.offset == 1 for s in shifts):
        return answer((), power=power, reason="a head predicts the next token")
    twice = [s for s in shifts if s.offset == 2 and s.share(2) >= minimum_share]
    if not twice or twice[0].first is None:
        return answer((), power=power, reason=f"{main.matches[2]} of {main.num_counting} positions point two tokens ahead")
    found = twice[0]
    example, position = twice[0].first
    token = int(batch.ids_BT[example, position + 2])
    return answer(
        [
            Finding(
                message=f"labels are shifted twice: position {position} of example {example} is trained to predict token {token}, "
                f"which stands two positions ahead ({found.matches[2]} of {found.num_counting} positions; none predicts the next "
                "token). The labels were shifted in the batch and once more by the loss. Shift in one place only: pass "
                "labels=input_ids to a class that shifts.",
                where=Where(example=example, position=position, token_id=token),
                measured=Quantity(value=2, unit="tokens ahead"),
                expected=Quantity(value=1, unit="tokens ahead"),
                remedy='batch["labels"] = batch["input_ids"].clone()  # with -100 where ignored',
            )
        ]
    )


def _beside(beside: Beside, step: int) -> Finding:
    example, position = beside.first or (0, 0)
    side = "after" if step > 0 else "before"
    return Finding(
        message=f"the labels stand beside the masked tokens instead of on them: position {position} of example {example} is trained, "
        f"and the mask token {beside.token} stands right {side} it, at position {position + step} ({beside.matches} of "
        f"{beside.num_counting} trained positions). A masked model predicts a token where it is hidden: do not shift its labels.",
        where=Where(example=example, position=position, token_id=beside.token),
        measured=Quantity(value=step, unit="tokens ahead"),
        expected=Quantity(value=0, unit="tokens ahead"),
        severity=Severity.WARNING,
        remedy="labels[b, t] = the token that was hidden at position t",
    )
