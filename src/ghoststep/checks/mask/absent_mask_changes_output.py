"""GS114."""

from ghoststep.evidence.equivalence import OtherMask
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check


@check(code="GS114", severity=Severity.WARNING, basis=Basis.MEASURED, explains_anywhere=("cache-changes-output",))
def absent_mask_changes_output(mask: OtherMask) -> Answer:
    """A text without padding gives other hidden states with an attention mask of ones than without a mask.

    ## What it finds
    The longest text of the batch alone and unpadded, in eval mode, with its mask and without one: the largest L2 change of a hidden
    state over the typical norm. Where the batch passes no mask, one of ones is added, if the model has a generation of
    transformers' kind. Tolerance 1e-4 in float32, 2e-2 in bfloat16 and float16 confirmed by a float32 copy of the weights, and
    never under ten times what benign changes of shape cause in the same run. A warning where the batch passes no mask and training
    generates (`intent="rl"`), which passes one; else a note, since nothing in the setup takes the other path.

    ## Why it matters
    Nothing is hidden by a mask of ones, so both are the same text. Where they differ, one of the two paths builds its mask wrongly
    (drops the causal part, adds 0/1 to the scores, counts positions from the mask), and training and service take different ones.

    ## When it is not a problem
    A mask that says something else than what padding is; packed batches, where leaving the mask out asks for isolation.

    ## How to confirm by hand
    Run one text with `attention_mask=torch.ones_like(input_ids)` and without, and compare the logits.

    ## How to fix
    Build the causal part in both paths; pass the mask in training as generation does.

    ## Options
    None.

    ## References
    None.
    """
    reading = mask.reading
    power = Power(quantity="change of a hidden state over its norm", smallest_detectable=reading.tolerance)
    said = f"{reading.variant.value}: {reading.change:.2g}"
    if not reading.num_above:
        return answer((), power=power, reason="; ".join((said, *mask.reasons)))
    how_much = (
        f"hidden states of {reading.num_above} of {reading.num_positions} positions of a text without padding move by up to "
        f"{reading.change:.2g} of their norm {reading.variant.value} (tolerance {reading.tolerance:.0e})"
    )
    if mask.has_mask:
        start = f"would break if the attention mask were left out (nothing in this setup does that): {how_much}"
        fix = "Keep passing the mask, in service too, or build the same causal mask in both paths."
    else:
        start = "training generates" if reading.used_by else "would break in generation"
        start += f", which passes an attention mask, and the batch passes none: {how_much}"
        fix = "Pass attention_mask in training as well, or build the same causal mask in both paths."
    finding = Finding(
        message=f"{start}. {fix}",
        where=Where(example=reading.example, position=reading.position),
        measured=Quantity(value=reading.change, unit="change over the norm of a hidden state"),
        expected=Quantity(value=reading.tolerance, unit="change over the norm of a hidden state"),
        severity=Severity.WARNING if reading.used_by else Severity.NOTE,
        remedy="one way to build the mask, with and without attention_mask",
    )
    return answer([finding])
