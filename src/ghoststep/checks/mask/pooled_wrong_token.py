"""GS111."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.equivalence import PooledExample, Pooling
from ghoststep.evidence.influence import Influence
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check

_UNMEASURED = Missing(reason="not measured")


@check(code="GS111", severity=Severity.ERROR, basis=Basis.PROOF)
def pooled_wrong_token(
    pooling: Pooling, influence: Influence | Missing = _UNMEASURED, batch: BatchFacts | Missing = _UNMEASURED
) -> Answer:
    """The vector of a text is taken from a padding position, or in a causal model from before the text's end.

    ## What it finds
    The gradient of the user's loss at the last hidden states lies on a single position of an example, and that position is PAD:
    the last one of a right-padded example, the first of a left-padded one. In a model that is causal by measurement also a real
    position with text behind it, which that vector cannot see: `mask.sum(1) - 1` under left padding, the first token of a decoder.

    ## Why it matters
    The hidden state at PAD is not that of the text. Training bends it into use for the lengths of this batch only.

    ## When it is not a problem
    The last real token in a causal model, any real one in a model that looks both ways; the same tokens behind the position in
    each example (a closing EOS). Only padded examples are looked at.

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
        early = _early(pooling, influence, batch)
        if early:
            return answer([_too_early(early, len(pooling.examples))])
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


def _early(pooling: Pooling, influence: Influence | Missing, batch: BatchFacts | Missing) -> list[PooledExample]:
    """Vectors of a causal model taken before the end of texts that end differently; none unless most examples do so."""
    if not isinstance(influence, Influence) or not influence.is_causal_by_measure or not isinstance(batch, BatchFacts):
        return []
    single = [e for e in pooling.examples if e.kind == "single"]
    unseen = [tuple(batch.ids_BT[e.example, e.position + 1 : e.last_real + 1].tolist()) for e in single]
    early = [e for e, ids in zip(single, unseen, strict=True) if ids]
    return early if len(set(unseen)) > 1 and 2 * len(early) >= len(single) else []


def _too_early(early: list[PooledExample], num_looked_at: int) -> Finding:
    first = early[0]
    return Finding(
        message=f"the vector of a text is taken before its end: the loss reads position {first.position} of example "
        f"{first.example} alone, whose last real token stands at {first.last_real}, and the model is causal, so that what comes "
        f"later is not in it ({len(early)} of {num_looked_at} padded examples). Take the last real token: hidden[:, -1] with left "
        "padding, hidden[range(B), mask.sum(1) - 1] with right padding.",
        where=Where(example=first.example, position=first.position),
        measured=Quantity(value=len(early), unit="vectors taken before the end"),
        expected=Quantity(value=0, unit="vectors taken before the end"),
        remedy="pool the last position where attention_mask == 1",
    )
