"""GS205."""

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.label_shift import counted, likely_offset, measure_shift, no_answer
from ghoststep.registry import Answer, Unknown, answer, check

PROMPT = 0


@check(code="GS205", severity=Severity.WARNING, basis=Basis.MEASURED)
def prompt_in_loss(xray: LossXray, batch: BatchFacts, *, tolerated_share: float = 0.0) -> Answer:
    """Tokens of the prompt are trained on, though the setup says which positions are the answer.

    ## What it finds
    Positions that carry loss, [B, T], whose target token has role "prompt" in `token_roles` of the setup.

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
    refused = no_answer(xray, signed=True)
    if refused:
        return Unknown(reason=refused)
    if batch.roles_BT is None:
        return Unknown(reason="the setup has no token_roles: nothing says which positions are the prompt")
    roles = batch.roles_BT.tolist()
    positions = list(counted(xray, likely_offset(measure_shift(xray, batch), batch)))
    bad = [c for c in positions if c.source is not None and roles[c.example][c.source] == PROMPT]
    share = sum(abs(c.weight) for c in bad) / sum(abs(c.weight) for c in positions)
    if not bad or share <= tolerated_share:
        return answer((), power=Power(quantity="prompt positions in the loss", smallest_detectable=1, unit="positions"))
    first = bad[0]
    return answer(
        [
            Finding(
                message=f"the prompt takes part in the loss: {len(bad)} of {len(positions)} trained positions predict prompt tokens, "
                f"{share:.0%} of the loss's weight; the first is position {first.position} of example {first.example}. Set their "
                "labels to -100, or mark them as answer in token_roles if this is meant.",
                where=Where(example=first.example, position=first.position, token_id=first.target),
                measured=Quantity(value=round(share, 4), unit="share of the loss's weight"),
                expected=Quantity(value=tolerated_share, unit="share of the loss's weight"),
                remedy="labels[token_roles == 0] = -100",
            )
        ]
    )
