"""GS112."""

from ghoststep.evidence.equivalence import OtherAttention
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check


@check(code="GS112", severity=Severity.WARNING, basis=Basis.MEASURED)
def attention_implementations_differ(attention: OtherAttention) -> Answer:
    """Two attention implementations of the model give other hidden states for the same text.

    ## What it finds
    One example as it stands in the batch, in eval mode, with the implementation in use and with the model's other ones (eager and
    sdpa, where the model has both): the largest L2 change of a real position's hidden state over the typical norm. Tolerance 1e-4
    in float32, 2e-2 in bfloat16 and float16 confirmed by a float32 copy of the weights, and never under ten times what benign
    changes of shape cause in the same run. A warning if the one in use disagrees with two others that agree with each other; else
    a note: which of two is right is not known, and the setup uses one.

    ## Why it matters
    Which implementation runs depends on the library version, the hardware and what is installed. A model that is trained with one
    and served with another is two models. A mask of one's own is often read the other way round (True = see, True = hide, 0/1
    added to the scores); a scale, soft cap, sink or position bias may be dropped by one of them.

    ## When it is not a problem
    The other one is never used. Positions that are padding may differ.

    ## How to confirm by hand
    Load the weights with `attn_implementation="eager"` and with `"sdpa"`, and compare the logits of real tokens.

    ## How to fix
    Name one `attn_implementation` everywhere, or mend the one that is wrong. Pass 2-dimensional masks (1 = keep).

    ## Options
    None.

    ## References
    Measured in transformers 5.24: Falcon with alibi, eager against sdpa, 2e-2 (one of them adds the position bias twice).
    """
    reading = attention.reading
    power = Power(quantity="change of a hidden state over its norm", smallest_detectable=reading.tolerance)
    said = f"{attention.used} against {attention.other}: {reading.change:.2g}"
    if not reading.num_above:
        return answer((), power=power, reason="; ".join((said, *attention.reasons)))
    how_much = (
        f"hidden states of {reading.num_above} of {reading.num_positions} real positions move by up to {reading.change:.2g} of their "
        f"norm (tolerance {reading.tolerance:.0e})"
    )
    if attention.outvoted:
        start = (
            f"the attention implementation in use, {attention.used}, is not what {attention.other} agree on: {how_much}. Look at "
            f"its scale, its mask and its position bias"
        )
    else:
        start = f"would be another model with attention {attention.other} instead of {attention.used}: {how_much}"
    if attention.own_mask:
        start += ". The call passes a mask of its own, which each of them may read in another way (True = see, or added to the scores)"
    finding = Finding(
        message=f'{start}. Name one implementation everywhere (attn_implementation="{attention.used}"), in training and in service.',
        where=Where(example=reading.example, position=reading.position),
        measured=Quantity(value=reading.change, unit="change over the norm of a hidden state"),
        expected=Quantity(value=reading.tolerance, unit="change over the norm of a hidden state"),
        severity=Severity.WARNING if attention.outvoted else Severity.NOTE,
        remedy="the same attn_implementation in training and in service",
    )
    return answer([finding])
