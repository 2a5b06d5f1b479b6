"""GS105."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.equivalence import OtherBatch
from ghoststep.evidence.influence import Influence, Region
from ghoststep.finding import Basis, Finding, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check
from ghoststep.visibility import NOTHING_EXPECTED, judge_region, looked_at, power_of, without_power

ERROR_CHANGE = 1e-3
"""Change over the norm from which another order of the batch is an error; a warning below."""


@check(
    code="GS105",
    severity=Severity.ERROR,
    basis=Basis.MEASURED,
    explains_anywhere=("blind-context", "order-blind", "padding-side-changes-output", "visible-target"),
)
def visible_batch_example(influence: Influence, batch: OtherBatch | Missing) -> Answer:
    """Examples of one batch see one another.

    ## What it finds
    A hidden state that moves, or has a gradient, when a token of another example of the batch changes. Error above 1e-3 of the
    own past's influence, warning above 1e-5 (swap, float32) or 1e-6 (gradient). A change without a gradient is a discrete
    choice (expert routing with a capacity) and a note.
    Beside that, two examples in eval mode alone and among others in another order: a hidden state that moves by more than 1e-4
    (float32; 2e-2 in bfloat16 and float16, confirmed by a float32 copy) and ten times what benign changes of shape cause depends
    on the place in the batch or the number of examples. Error above 1e-3 of its norm, else warning; a note where an example's
    first token stays (a discrete choice).

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
        moved = [] if isinstance(batch, Missing) else _by_place(batch)
        return answer(moved) if moved else without_power(influence) or answer((), power=power_of(influence))
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


def _by_place(batch: OtherBatch) -> list[Finding]:
    """What another order of the batch changes although no token of another example does."""
    reading = batch.reading
    if not reading.num_above:
        return []
    severity = Severity.ERROR if reading.change > ERROR_CHANGE else Severity.WARNING
    return [
        Finding(
            message="an example depends on where it stands in the batch, or on how many stand there: hidden states of "
            f"{reading.num_above} of {reading.num_positions} real positions move by up to {reading.change:.2g} of their norm "
            f"between alone and {reading.variant.value} (tolerance {reading.tolerance:.0e}). Look for tensors indexed by the place in "
            "the batch, and for buffers or states kept from one call to the next.",
            where=Where(example=reading.example, position=reading.position),
            measured=Quantity(value=reading.change, unit="change over the norm of a hidden state"),
            expected=Quantity(value=reading.tolerance, unit="change over the norm of a hidden state"),
            severity=severity if reading.starts_move else Severity.NOTE,
            remedy="compute each example from itself alone",
        )
    ]
