"""GS111."""

from ghoststep.evidence.equivalence import Pooling
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check


@check(code="GS111", severity=Severity.ERROR, basis=Basis.PROOF)
def pooled_wrong_token(pooling: Pooling) -> Answer:
    """The vector of a text is taken from a padding position.

    ## What it finds
    The gradient of the user's loss at the last hidden states lies on a single position of an example, and that position is PAD:
    the last one of a right-padded example, the first of a left-padded one.

    ## Why it matters
    The hidden state at PAD is not that of the text. Training bends it into use for the lengths of this batch only.

    ## When it is not a problem
    The single position is a real token; no example is padded.

    ## How to confirm by hand
    Encode a short text alone and together with a long one: the vectors must agree.

    ## How to fix
    Take `hidden[range(B), mask.sum(1) - 1]` with right padding, or pad on the left for last-token pooling.

    ## Options
    None.

    ## References
    Measured: right padding and last-token pooling on a decoder: cosine -0.14 to the unpadded vector.
    """
    wrong = [e for e in pooling.examples if e.kind == "single" and e.num_padding]
    power = Power(quantity="vectors taken from padding", smallest_detectable=1, unit="examples")
    if not wrong:
        return answer((), power=power, reason=f"{len(pooling.examples)} padded examples looked at")
    first = wrong[0]
    place = "last" if first.position > first.last_real else "first"
    right = first.last_real if place == "last" else first.first_real
    return answer(
        [
            Finding(
                message=f"the vector of a text is taken from padding: the loss reads position {first.position} of example "
                f"{first.example} alone, whose {place} real token stands at {right} (PAD by {pooling.padding_source}; "
                f"{len(wrong)} of {len(pooling.examples)} padded examples). Take the {place} real token by the attention mask, or pad "
                "on the other side.",
                where=Where(example=first.example, position=first.position),
                measured=Quantity(value=len(wrong), unit="vectors taken from padding"),
                expected=Quantity(value=0, unit="vectors taken from padding"),
                remedy=f"pool the {place} position where attention_mask == 1",
            )
        ]
    )
