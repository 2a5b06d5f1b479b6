"""GS116."""

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.influence import Influence, Region
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(
    code="GS116",
    severity=Severity.ERROR,
    basis=Basis.MEASURED,
    explains_anywhere=(
        "padding-idx-on-real-token",
        "padding-side-changes-output",
        "padding-in-loss",
        "visible-padding",
        "blind-context",
        "order-blind",
        "nothing-visible",
        "visible-batch-example",
        "pooled-padding",
        "pooled-wrong-token",
    ),
)
def inverted_attention_mask(batch: BatchFacts, influence: Influence, *, minimum_share: float = 0.9) -> Answer:
    """The attention mask says 1 at padding and 0 at text: the model reads the pads and hides the words.

    ## What it finds
    attention_mask [B, T] against the ids, over examples that hold a run of the pad id at either end: at least nine tenths of the
    positions with the pad id are kept by the mask, and at least nine tenths of all others are hidden. The model obeys the mask: no
    token that it hides was seen to move another one.

    ## Why it matters
    Every position sees padding only. The loss falls to the frequencies of single tokens and stays there.

    ## When it is not a problem
    A mask that the model means the other way round (True: left out; or numbers that are added, 0 for what is kept): then the tokens
    that look hidden are seen, and this is silent.

    ## How to confirm by hand
    `input_ids[attention_mask == 1]` holds nothing but the pad id.

    ## How to fix
    `attention_mask = (input_ids != pad_token_id).long()`, or the tokenizer's own.

    ## Options
    `minimum_share`: part of either kind of position that the mask must tell the wrong way (0.9).

    ## References
    None.
    """
    if not batch.has_attention_mask or batch.padding_BT is None or batch.pad_id is None:
        return NotApplicable(reason="no attention_mask, or no pad id to compare it with")
    kept_pads = pads = hidden_words = words = 0
    first = None
    for b, (ids, hidden) in enumerate(zip(batch.ids_BT.tolist(), batch.padding_BT.tolist(), strict=True)):
        left = next((t for t, i in enumerate(ids) if i != batch.pad_id), len(ids))
        right = next((t for t, i in enumerate(reversed(ids)) if i != batch.pad_id), len(ids))
        if left + right == 0 or left == len(ids):
            continue
        text = range(left, len(ids) - right)
        pads += left + right
        kept_pads += sum(not h for t, h in enumerate(hidden) if t not in text)
        words += len(text)
        hidden_words += sum(hidden[t] for t in text)
        first = first or next(((b, t) for t in text if hidden[t]), None)
    if not pads or not words:
        return NotApplicable(reason=f"no example is padded with the pad id {batch.pad_id}")
    power = Power(quantity="share of positions told the wrong way", smallest_detectable=minimum_share)
    reason = f"the mask keeps {kept_pads} of {pads} pads and hides {hidden_words} of {words} other positions"
    if kept_pads < minimum_share * pads or hidden_words < minimum_share * words or first is None:
        return answer((), power=power, reason=reason)
    readings = [
        r for found in (influence.readings, influence.gradient_readings) if (r := found.get(Region.PADDING)) is not None
    ]
    if not readings:
        return Unknown(reason=f"{reason}, but whether the model obeys it was not seen")
    if any(r.num_above for r in readings):
        return answer((), power=power, reason=f"{reason}, but the model means the mask the other way round")
    example, position = first
    return answer(
        [
            Finding(
                message=f"the attention mask is inverted: it keeps {kept_pads} of {pads} positions with the pad id {batch.pad_id} and "
                f"hides {hidden_words} of {words} others, and the model obeys it: no hidden token moves another (the first is position "
                f"{position} of example {example}). Use attention_mask = (input_ids != pad_token_id).",
                where=Where(example=example, position=position),
                measured=Quantity(value=round(hidden_words / words, 4), unit="share of the text that is hidden"),
                expected=Quantity(value=0, unit="share of the text that is hidden"),
                remedy="attention_mask = (input_ids != pad_token_id).long()",
            )
        ]
    )
