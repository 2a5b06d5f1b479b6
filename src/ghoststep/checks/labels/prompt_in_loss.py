"""GS205."""

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.label_shift import MIN_COUNTING, counted, likely_offset, measure_shift, no_answer
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check

PROMPT, ANSWER = 0, 1


@check(code="GS205", severity=Severity.WARNING, basis=Basis.MEASURED)
def prompt_in_loss(xray: LossXray, batch: BatchFacts, *, tolerated_share: float = 0.0) -> Answer:
    """Tokens of the prompt are trained on, though the setup says which positions are the answer.

    ## What it finds
    Positions that carry loss, [B, T], whose target token has role "prompt" in `token_roles` of the setup. An error where they are
    all that carries loss, so that no answer is trained.

    ## Why it matters
    The model also learns to write users' questions; with long prompts and short answers most of the gradient comes from them.

    ## When it is not a problem
    Training on whole conversations on purpose: then give no `token_roles`, or mark those positions as answer. Tokens of the
    template (role 2) are not counted.

    ## How to confirm by hand
    Decode `input_ids[labels != -100]`.

    ## How to fix
    Set the labels of prompt positions to -100, or use completion-only loss of the trainer.

    ## Options
    `tolerated_share`: share of the loss's weight on the prompt that is accepted, 0 by default.

    ## References
    None.
    """
    if batch.roles_BT is None:
        return NotApplicable(reason="the setup has no token_roles: nothing says that a part of the texts is a prompt")
    refused = no_answer(xray, signed=True)
    if refused:
        return Unknown(reason=refused)
    roles = batch.roles_BT.tolist()
    shift = measure_shift(xray, batch)
    if shift.offset is None and shift.num_counting >= MIN_COUNTING and batch.intent != "masked":
        # Masked-LM without a declared intent: which token a position predicts cannot be read off the ids.
        return Unknown(
            reason="the labels are neither the tokens of their positions nor the next ones: roles cannot be assigned"
        )
    positions = list(counted(xray, likely_offset(shift, batch)))
    bad = [c for c in positions if c.source is not None and roles[c.example][c.source] == PROMPT]
    share = sum(abs(c.weight) for c in bad) / sum(abs(c.weight) for c in positions)
    if not bad or share <= tolerated_share:
        return answer((), power=Power(quantity="prompt positions in the loss", smallest_detectable=1, unit="positions"))
    first = bad[0]
    has_answer = bool((batch.roles_BT == ANSWER).any())
    answered = any(c.source is not None and roles[c.example][c.source] == ANSWER for c in positions)
    is_turned = has_answer and not answered
    turned = " No token of an answer carries loss: the mask of the labels is the wrong way round." if is_turned else ""
    return answer(
        [
            Finding(
                message=f"the prompt takes part in the loss: {len(bad)} of {len(positions)} trained positions predict prompt tokens, "
                f"{share:.0%} of the loss's weight; the first is position {first.position} of example {first.example}.{turned} Set "
                "their labels to -100, or mark them as answer in token_roles if this is meant.",
                where=Where(example=first.example, position=first.position, token_id=first.target),
                measured=Quantity(value=round(share, 4), unit="share of the loss's weight"),
                expected=Quantity(value=tolerated_share, unit="share of the loss's weight"),
                severity=Severity.ERROR if is_turned else Severity.WARNING,
                remedy="labels[token_roles == 0] = -100",
            )
        ]
    )
