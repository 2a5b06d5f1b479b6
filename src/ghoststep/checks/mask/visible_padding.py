"""GS102."""

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.influence import Influence, Region
from ghoststep.finding import Basis, Finding, Severity, Where
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check
from ghoststep.visibility import (
    NOTHING_EXPECTED,
    Seen,
    examples_mixed,
    judge_region,
    looked_at,
    not_read,
    power_of,
    through_nothing,
    without_power,
)


@check(
    code="GS102",
    severity=Severity.ERROR,
    basis=Basis.MEASURED,
    explains_anywhere=("padding-side-changes-output", "blind-context", "nothing-visible", "attention-implementations-differ"),
)
def visible_padding(influence: Influence, batch: BatchFacts) -> Answer:
    """Real tokens see padding.

    ## What it finds
    The change of hidden states at real positions when every PAD token is replaced (and their gradient at PAD's embeddings), over
    what the own past does. What is PAD is what the batch means to be: `attention_mask == 0`, else runs of the pad id at the
    ends. Error above 1e-3, warning above 1e-5 (swap, float32) or 1e-6 (gradient).

    ## Why it matters
    What a text means then depends on how long its neighbours in the batch are: training noise, and other outputs when served
    alone.

    ## When it is not a problem
    Right padding in a causal model; padding that sees padding; PAD nobody declares.

    ## How to confirm by hand
    Replace the PAD ids by other ids, keep the mask, and compare the logits at real positions.

    ## How to fix
    Pass the attention mask, in the meaning that the model expects: 1 = keep for most models, True = ignore for
    `nn.MultiheadAttention`'s `key_padding_mask`, an additive mask needs large negative values at PAD and 0 elsewhere. It must
    stand over the keys, [B, 1, 1, T]. Recurrent layers need the PAD inputs zeroed or the padding on the right.

    ## Options
    None.

    ## References
    None.
    """
    looked = looked_at(influence, Region.PADDING)
    elsewhere = looked and influence.num_texts > 1  # the facts of the batch are those of one text
    if batch.padding_BT is None and not influence.encoder_padding and not elsewhere:
        return NotApplicable(reason=f"nothing says what padding is ({batch.padding_source})")
    if not influence.encoder_padding and batch.padding_BT is not None and not batch.padding_BT.any() and not elsewhere:
        return not_read(influence) or NotApplicable(reason="the first batch has no padding")
    mixed = examples_mixed(influence)
    if mixed is not None:
        return mixed
    if not looked:
        if influence.num_examples < len(batch.ids_BT):
            return Unknown(reason="no padding in the call of the model that was looked at, the first of several")
        return not_read(influence) or NotApplicable(reason="no example has both padding and real tokens that were looked at")
    seen = judge_region(influence, Region.PADDING)
    if seen is None:
        return without_power(influence) or answer((), power=power_of(influence), reason=f"{batch.padding_source}: not seen")
    if through_nothing(influence, seen):
        return Unknown(reason=f"padding is visible through positions without any visible key (GS107): {seen.proof}")
    return answer([_finding(influence, batch, seen)])


def _finding(influence: Influence, batch: BatchFacts, seen: Seen) -> Finding:
    example, position = seen.reading.target
    source = "of the encoder" if influence.encoder_padding else f"by {batch.padding_source}"
    if not influence.encoder_padding and not seen.reading.text:
        source += f"; it stands at the {batch.sides}"
    given = (
        "a mask is passed, but the model does not take it as it is meant (1 = keep, True = ignore, additive, over keys?)"
        if batch.has_attention_mask
        else "no attention mask is passed: pass one"
    )
    return Finding(
        message=f"real tokens see padding ({source}): {seen.proof}. Outputs depend on how much padding a batch needs. "
        f"Here {given}.",
        where=Where(example=example, position=position),
        measured=seen.measured,
        expected=NOTHING_EXPECTED,
        severity=seen.severity,
        remedy="mask PAD as a key for every real position",
    )
