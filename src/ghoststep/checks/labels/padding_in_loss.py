"""GS204."""

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.label_shift import Counted, counted, likely_offset, measure_shift, no_answer
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS204", severity=Severity.ERROR, basis=Basis.MEASURED, explains_anywhere=("uneven-token-weight",))
def padding_in_loss(xray: LossXray, batch: BatchFacts) -> Answer:
    """The model is trained to predict padding.

    ## What it finds
    Positions that carry loss (d loss / d logits is not 0), [B, T], whose target token is PAD by intent: attention_mask == 0, else
    a run of pad_token_id at the end of an example.

    ## Why it matters
    Predicting PAD after PAD is trivial: the reported loss is too low by the share of padding, the gradient of real tokens is
    diluted by it, and in batches of short texts the model mostly learns padding.

    ## When it is not a problem
    Where PAD and the end token share an id, the first one after the text is the text's own end. A left pad that is trained
    to predict the first real token is not counted either: its target is real.

    ## How to confirm by hand
    `(labels != -100) & (attention_mask == 0)` has True entries, or the loss passes no `ignore_index`.

    ## How to fix
    `labels[attention_mask == 0] = -100`, from the attention mask and not from the pad id (which may be the end token too).

    ## Options
    None.

    ## References
    None.
    """
    refused = no_answer(xray, signed=True)
    if refused:
        return Unknown(reason=refused)
    if batch.padding_BT is None:
        return Unknown(reason=f"nothing says which positions are padding: {batch.padding_source}")
    if not batch.padding_BT.any():
        return NotApplicable(reason="no padding in this batch")
    shift = measure_shift(xray, batch)
    offset = likely_offset(shift, batch)
    padding = batch.padding_BT.tolist()
    ids = batch.ids_BT.tolist()
    positions = list(counted(xray, offset))
    bad = [
        c
        for c in positions
        if _predicts_padding(c, padding[c.example], ids[c.example], batch, is_known=shift.offset is not None)
    ]
    if not bad:
        return answer((), power=Power(quantity="positions that predict padding", smallest_detectable=1, unit="positions"))
    total = sum(abs(c.weight) for c in positions)
    share = sum(abs(c.weight) for c in bad) / total
    first = bad[0]
    examples = len({c.example for c in bad})
    return answer(
        [
            Finding(
                message=f"padding takes part in the loss: {len(bad)} of {len(positions)} trained positions predict PAD "
                f"({batch.padding_source}), {share:.0%} of the loss's weight, in {examples} examples; the first is position "
                f"{first.position} of example {first.example} with target {first.target}. Set labels[attention_mask == 0] = -100.",
                where=Where(example=first.example, position=first.position, token_id=first.target),
                measured=Quantity(value=round(share, 4), unit="share of the loss's weight"),
                expected=Quantity(value=0, unit="share of the loss's weight"),
                remedy="labels[attention_mask == 0] = -100",
            )
        ]
    )


def _predicts_padding(c: Counted, padding: list[bool], ids: list[int], batch: BatchFacts, *, is_known: bool) -> bool:
    if c.source is None or not padding[c.source]:
        return False
    if not is_known and c.target != ids[c.source]:  # hidden tokens (masked models): which token is predicted was not measured
        return False
    is_own_end = c.target in batch.eos_ids and c.target == ids[c.source] and c.source > 0 and not padding[c.source - 1]
    return not is_own_end
