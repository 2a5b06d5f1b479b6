"""GS110."""

from ghoststep.evidence.equivalence import Pooling
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check


@check(code="GS110", severity=Severity.ERROR, basis=Basis.PROOF)
def pooled_padding(pooling: Pooling) -> Answer:
    """The vector of a text is pooled over its padding too.

    ## What it finds
    The gradient of the user's loss at the last hidden states: where all positions of an example carry proportional gradients (a
    mean) or each dimension one position's (a maximum), and PAD positions are among them.

    ## Why it matters
    A short text in a long batch becomes mostly padding: its vector moves towards that of every other short text, and it changes
    with the batch that the text happens to be in.

    ## When it is not a problem
    Losses over single positions (language modelling); batches without padding.

    ## How to confirm by hand
    Encode a short text alone and together with a long one: the vectors must agree.

    ## How to fix
    `(hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)`; for a maximum fill PAD with -inf first.

    ## Options
    None.

    ## References
    None.
    """
    wrong = [e for e in pooling.examples if e.kind != "single" and e.num_padding]
    power = Power(quantity="padding positions that are pooled", smallest_detectable=1, unit="positions")
    if not wrong:
        return answer((), power=power, reason=f"{len(pooling.examples)} padded examples looked at")
    worst = max(wrong, key=lambda e: e.num_padding / e.num_used)
    return answer(
        [
            Finding(
                message=f"the vector of a text is a {worst.kind} over padding too: {worst.num_padding} of the {worst.num_used} "
                f"positions that the loss reads in example {worst.example} are PAD (by {pooling.padding_source}; "
                f"{len(wrong)} of {len(pooling.examples)} padded examples). It changes with the longest text of the batch. Multiply "
                "the hidden states by the attention mask and divide by its sum.",
                where=Where(example=worst.example, position=worst.position),
                measured=Quantity(value=worst.num_padding, unit="padding positions pooled"),
                expected=Quantity(value=0, unit="padding positions pooled"),
                remedy="pool over attention_mask == 1 only",
            )
        ]
    )
