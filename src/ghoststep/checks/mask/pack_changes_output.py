"""GS115."""

from ghoststep.evidence.equivalence import Packed
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check


@check(code="GS115", severity=Severity.WARNING, basis=Basis.MEASURED)
def pack_changes_output(packed: Packed) -> Answer:
    """A document in an announced pack gives other hidden states than the same document alone.

    ## What it finds
    Up to two documents that stand behind others in one example, in eval mode, against the same documents alone (arguments cut to
    them, positions from the start): the largest L2 change of a hidden state over the typical norm. Tolerance 1e-4 in float32, 2e-2
    in bfloat16 and float16 confirmed by a float32 copy of the weights, and never under ten times what benign changes of shape
    cause in the same run. A note where a document's first token stays (chunks, routing).

    ## Why it matters
    The pack is meant to be a matter of speed. If a document gets positions that go on from the one before it, it is trained at
    places it never has when it is served alone.

    ## When it is not a problem
    Relative or rotary positions (nothing moves); attention chunks that are counted from the start of the pack; a model that is
    meant to see texts at every position.

    ## How to confirm by hand
    Run the second document of a pack alone, and compare its logits with those in the pack.

    ## How to fix
    Pass `position_ids` that start again at 0 with every document, and see that the model uses them.

    ## Options
    None.

    ## References
    Documents that see one another are `visible-neighbour-document`, of which this is then a symptom.
    """
    reading = packed.reading
    power = Power(quantity="change of a hidden state over its norm", smallest_detectable=reading.tolerance)
    said = f"{packed.source}: {reading.num_positions} positions move by up to {reading.change:.2g}"
    if not reading.num_above:
        return answer((), power=power, reason="; ".join((said, *packed.reasons)))
    if packed.has_position_ids:
        fix = "See that position_ids start again with every document, and that the model uses them and nothing else for positions."
    else:
        fix = "Pass position_ids that start again at 0 with every document."
    if not reading.starts_move:
        fix = "The document's first token stays, so chunks or routing that count from the start of the pack are the likely reason."
    finding = Finding(
        message=f"a packed document ({packed.source}) is not to the model what it is alone: hidden states of {reading.num_above} of "
        f"{reading.num_positions} positions move by up to {reading.change:.2g} of their norm (tolerance {reading.tolerance:.0e}). "
        + fix,
        where=Where(example=reading.example, position=reading.position, document=packed.document),
        measured=Quantity(value=reading.change, unit="change over the norm of a hidden state"),
        expected=Quantity(value=reading.tolerance, unit="change over the norm of a hidden state"),
        severity=Severity.WARNING if reading.starts_move else Severity.NOTE,
        remedy="position_ids that restart with every document",
    )
    return answer([finding])
