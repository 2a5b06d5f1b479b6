"""GS106."""

from ghoststep.evidence.equivalence import Equivalence, Variant, VariantReading
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check

ERROR_CHANGE = 1e-3
"""Change over the norm from which the batch's own padding is an error; a warning below."""


@check(code="GS106", severity=Severity.ERROR, basis=Basis.MEASURED)
def padding_side_changes_output(equivalence: Equivalence) -> Answer:
    """A padded text gives other hidden states than the same text alone.

    ## What it finds
    Up to two padded examples, in eval mode, as they stand in the batch and padded on the other side, each against the same
    example alone and unpadded: the largest L2 change of a real position's hidden state over the typical norm. Tolerance 1e-4 in
    float32, 2e-2 in bfloat16 and float16 confirmed by a float32 copy of the weights (0.1 where none can be run), and never under
    ten times what benign changes of shape (a second run, a copy of the text beside it, a shorter text) cause in the same run;
    usual ones cause up to 5e-6 in float32 and 2.2e-2 in bfloat16. For the side that the
    batch uses an error above 1e-3 and a warning below (a note where an example's first token stays: routing); a warning for the
    side that only the tokenizer is set to. A side that nothing in the setup uses is measured and told in the reason of a clear.

    ## Why it matters
    With learned positions, left padding shifts every token to a position it will not have when the text is served alone. The
    model trains on one mapping and is used with another.

    ## When it is not a problem
    Left padding with relative or rotary positions and a mask; `position_ids` that count real tokens only; a side that the
    setup never uses.

    ## How to confirm by hand
    Run one example alone and in its padded batch, and compare the logits of its last token.

    ## How to fix
    Pad on the right for training, or pass `position_ids = attention_mask.cumsum(-1) - 1` (clamped at 0); pass the attention mask.

    ## Options
    None.

    ## References
    Measured: GPT-2 padded on the left without `position_ids` 0.39 to 1.1, with them 4e-8 to 6e-7.
    """
    findings = [_finding(equivalence, r) for r in equivalence.readings if r.num_above and _is_used(r)]
    largest = max(equivalence.readings, key=lambda r: r.tolerance)
    power = Power(quantity="change of a hidden state over its norm", smallest_detectable=largest.tolerance)
    said = ", ".join(
        f"{r.variant.value} {r.change:.2g}" + ("" if _is_used(r) else " (nothing in this setup does that)")
        for r in equivalence.readings
    )
    return answer(findings, power=power, reason="; ".join((said, *equivalence.reasons)))


def _is_used(reading: VariantReading) -> bool:
    return reading.variant is Variant.AS_BATCHED or bool(reading.used_by)


def _finding(equivalence: Equivalence, reading: VariantReading) -> Finding:
    how_much = (
        f"hidden states of {reading.num_above} of {reading.num_positions} real positions move by up to {reading.change:.2g} of their "
        f"norm against the same text alone (tolerance {reading.tolerance:.0e})"
    )
    fix = (
        "Pad on the other side; or pass the attention mask and, to a model that takes them, position_ids that count real tokens only "
        "(attention_mask.cumsum(-1) - 1, at least 0)."
    )
    if reading.variant is Variant.AS_BATCHED:
        start = f"padding on the {equivalence.side} changes what a text is to the model: {how_much}, example {reading.example}"
        severity = Severity.ERROR if reading.change > ERROR_CHANGE else Severity.WARNING
        if not reading.starts_move:
            severity = Severity.NOTE
            fix = (
                "The first token does not move, so a discrete choice (routing by capacity, chunks) is the likely reason. " + fix
            )
    else:
        start = f"{reading.used_by} pads on the {_side(reading)}, and that changes what a text is to the model: {how_much}"
        severity = Severity.WARNING
    is_here = reading.variant is Variant.AS_BATCHED
    return Finding(
        message=f"{start}. {fix}",
        where=Where(example=reading.example, position=reading.position) if is_here else Where(),
        measured=Quantity(value=reading.change, unit="change over the norm of a hidden state"),
        expected=Quantity(value=reading.tolerance, unit="change over the norm of a hidden state"),
        severity=severity,
        remedy="position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)",
    )


def _side(reading: VariantReading) -> str:
    return "left" if reading.variant is Variant.LEFT else "right"
