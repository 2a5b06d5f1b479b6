"""GS105."""

from ghoststep.evidence.influence import Influence, Region
from ghoststep.finding import Basis, Finding, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check
from ghoststep.visibility import NOTHING_EXPECTED, judge_region, looked_at, power_of, without_power


@check(
    code="GS105",
    severity=Severity.ERROR,
    basis=Basis.MEASURED,
    explains_anywhere=("blind-context", "order-blind", "padding-side-changes-output", "visible-target"),
)
def visible_batch_example(influence: Influence) -> Answer:
    """Examples of one batch see one another.

    ## What it finds
    A hidden state that moves, or has a gradient, when a token of another example of the batch changes. Error above 1e-3 of the
    own past's influence, warning above 1e-5 (swap, float32) or 1e-6 (gradient). A change without a gradient is a discrete
    choice (expert routing with a capacity) and a note.

    ## Why it matters
    Examples are meant to be independent. With shared statistics or mixed-up dimensions a text is predicted from its neighbours,
    which are not there when the model is served.

    ## When it is not a problem
    Routing with a capacity, where full experts drop tokens of other examples (a note); a contrastive loss over the batch (the
    hidden states themselves stay independent).

    ## How to confirm by hand
    Change one example of the batch and compare the logits of the others.

    ## How to fix
    Look for BatchNorm (use LayerNorm or RMSNorm), for `view` or `reshape` that mixes batch and time where `transpose` was
    meant, and for statistics taken over dimension 0.

    ## Options
    None.

    ## References
    None.
    """
    if influence.num_examples < 2:
        return NotApplicable(reason="the first batch has one example")
    if not looked_at(influence, Region.OTHER_EXAMPLE):
        return NotApplicable(reason="no second example has real tokens to look at")
    seen = judge_region(influence, Region.OTHER_EXAMPLE)
    if seen is None or not influence.coupled:
        return without_power(influence) or answer((), power=power_of(influence))
    example, position = seen.reading.target
    if influence.coupled == "discrete":
        message = (
            f"a discrete choice couples the examples of a batch (no gradient flows): {seen.proof}. This is usual for expert "
            "routing with a capacity; outputs then depend on what else is in the batch."
        )
    else:
        message = (
            f"examples of the batch see one another: {seen.proof}. A text is predicted from its neighbours in the batch, which "
            "are missing when the model is served. Look for BatchNorm, a reshape that mixes batch and time, or statistics over "
            "dimension 0."
        )
    return answer(
        [
            Finding(
                message=message,
                where=Where(example=example, position=position),
                measured=seen.measured,
                expected=NOTHING_EXPECTED,
                severity=Severity.NOTE if influence.coupled == "discrete" else seen.severity,
                remedy="normalise within an example; keep batch and time apart",
            )
        ]
    )
