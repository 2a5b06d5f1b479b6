"""GS203."""

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.influence import Influence
from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.label_shift import at, counted, no_answer
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS203", severity=Severity.ERROR, basis=Basis.MEASURED)
def visible_target(
    xray: LossXray,
    batch: BatchFacts,
    influence: Influence,
    *,
    error_above: float = 1e-3,
    tolerated_share: float = 0.3,
) -> Answer:
    """A position's output depends on the very token that it is trained to predict.

    ## What it finds
    For positions t that carry loss with target ids[t + s], s = 0 or 1: the influence [S, T] of position t + s on t is not 0. The
    target comes from the gradient of the user's own loss, the influence from changing tokens: neither is guessed.

    ## Why it matters
    The answer is in the input. The loss falls far below what language allows and the model is useless where the answer is absent.

    ## When it is not a problem
    Masked language models keep a tenth of the chosen tokens as they are; a prefix language model sees its whole prefix but is
    trained on what follows; text diffusion replaces what it predicts; the encoder of an encoder-decoder may see everything.

    ## How to confirm by hand
    Change one input token and look whether the logits move at the position whose label it is.

    ## How to fix
    Where s = 1, restore the causal mask. Where s = 0, shift the labels, or, for a masked model, set the labels of tokens that are
    not masked to -100.

    ## Options
    `error_above`: influence relative to the own past from which it is an error (1e-3); from a hundredth of it a warning.
    `tolerated_share`: share of the trained positions that may see their own token (0.3): kept tokens are 0.1 in BERT's recipe.

    ## References
    None.
    """
    refused = no_answer(xray)
    if refused:
        return Unknown(reason=refused)
    example, matrix = influence.matrix_example, influence.matrix_ST
    ids_of = batch.ids_BT.tolist()
    floor = max(0.01 * error_above, influence.floor)
    num, num_own, later, own = 0, 0, [], []
    for c in counted(xray, 0):
        t, ids = c.position, ids_of[c.example]
        num += 1
        num_own += ids[t] == c.target
        if c.example == example:
            own += [(t, at(matrix, t, t))] if ids[t] == c.target else []
            later += [(t, at(matrix, t + 1, t))] if t + 1 < len(ids) and ids[t + 1] == c.target != ids[t] else []
    looked_later, looked_own = ([p for p in found if p[1] == p[1]] for found in (later, own))  # NaN: not looked at
    bad_later, bad_own = ([p for p in found if p[1] > floor] for found in (looked_later, looked_own))
    power = Power(quantity="influence of the target token, relative to the own past", smallest_detectable=floor)
    if bad_later:
        bad, looked, which, fix = bad_later, looked_later, 1, "restore the causal mask"
    elif bad_own and num_own > tolerated_share * num:
        if influence.is_causal_by_measure:
            return NotApplicable(reason="a causal model whose labels are not shifted: unshifted-labels judges it")
        bad, looked, which, fix = bad_own, looked_own, 0, "shift the labels, or ignore tokens that a masked model can see"
    elif not influence.has_power:
        return Unknown(reason="the influence of the own past is not above the noise floor, so none would have been seen")
    elif not looked_later and num_own > tolerated_share * num and not looked_own:
        return Unknown(reason="the influence of the target tokens was not measured at the trained positions")
    else:
        return answer((), power=power, reason=f"{num_own} of {num} trained positions predict their own token")
    position, strength = max(bad, key=lambda p: p[1])
    token = ids_of[example][position + which]
    place = influence.trained_future.target if which and influence.trained_future is not None else (example, position)
    return answer(
        [
            Finding(
                message=f"the answer is visible: {len(bad)} of {len(looked)} positions looked at in example {example} depend on "
                f"the token they are trained to predict; position {position} predicts token {token}, which stands at position "
                f"{position + which}, and changing that token moves its output by {strength:.2g} of what its own past does. To fix, "
                f"{fix}.",
                where=Where(example=place[0], position=place[1]),
                measured=Quantity(value=strength, unit="influence relative to the own past"),
                expected=Quantity(value=0, unit="influence relative to the own past"),
                severity=Severity.ERROR if strength > error_above else Severity.WARNING,
            )
        ]
    )
