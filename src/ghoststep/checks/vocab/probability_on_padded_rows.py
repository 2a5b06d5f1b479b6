"""GS003."""

import math

from ghoststep.evidence.base import Missing
from ghoststep.evidence.loss import ClassMass, LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check


@check(code="GS003", severity=Severity.ERROR, basis=Basis.MEASURED)
def probability_on_padded_rows(
    mass: ClassMass, xray: LossXray | Missing, *, tolerated_mass: float = 0.05, trained_below: float = 0.5
) -> Answer:
    """Output rows that no token stands for take a large part of the model's probability.

    ## What it finds
    The mean over supervised positions of the softmax's mass on classes without a token in the tokenizer, computed from the model's
    own logits [B, T, V], against their share of the classes (what a fresh model gives them) and against the loss.

    ## Why it matters
    Rows added for alignment were never initialised or reset: the loss starts huge, gradients push those rows away instead of
    learning, and sampling returns ids that the tokenizer cannot decode.

    ## When it is not a problem
    A freshly initialised model gives each class about 1 / V, these too; a trained one has pushed them to about 0; logits that are
    masked or cut off before the loss.

    ## How to confirm by hand
    `model(**batch).logits.softmax(-1)[..., len(tokenizer):].sum(-1).mean()`

    ## How to fix
    Mask the rows out of the softmax, or set them to the mean of the trained rows with a strongly negative bias; and initialise
    rows when a table grows.

    ## Options
    `tolerated_mass`: mass that is accepted in any case, 0.05. `trained_below`: a model counts as trained where its loss over the
    real classes is this many nats under that of a uniform guess, 0.5.

    ## References
    Thresholds from fresh and trained tiny models with and without garbage rows.
    """
    if mass.num_without_token == 0:
        return NotApplicable(reason="every class of the head has a token")
    if (
        isinstance(xray, LossXray)
        and xray.masked_classes >= mass.num_without_token
        and xray.first_masked_class == mass.first_class
    ):
        return answer((), reason=f"the loss masks or cuts off all {xray.masked_classes} of them")
    share = mass.uniform_mass
    is_trained = mass.real_loss < math.log(max(mass.num_tokens, 2)) - trained_below  # False for NaN
    limit = max(tolerated_mass, 0.5 * share if is_trained else min(2 * share, 0.5 * (1 + share)))
    figures = f"mass {mass.mass:.3g}, {share:.3g} if uniform"
    if mass.mass <= limit:
        return answer((), power=Power(quantity="probability mass", smallest_detectable=limit), reason=figures)
    proof = ""
    if math.isfinite(mass.mean_loss) and math.isfinite(mass.real_loss):
        proof = f"; the loss is {mass.mean_loss:.3f}, and {mass.real_loss:.3f} without them"
    return answer(
        [
            Finding(
                message=f"output rows {mass.first_class}..{mass.last_class} ({mass.num_without_token} of {mass.num_classes}) have no "
                f"token, yet hold {mass.mass:.1%} of the probability on this batch ({share:.1%} if uniform{proof}); the strongest is "
                f"row {mass.top_class} with {mass.top_mass:.1%}. Mask them out of the softmax or re-initialise them.",
                where=Where(token_id=mass.top_class),
                measured=Quantity(value=round(mass.mass, 6), unit="probability mass"),
                expected=Quantity(value=0, unit="probability mass"),
                remedy="logits[..., num_tokens:] = -inf, or re-initialise the rows",
            )
        ]
    )
