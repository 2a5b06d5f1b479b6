"""GS208."""

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.label_shift import counted, likely_offset, measure_shift, no_answer
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS208", severity=Severity.ERROR, basis=Basis.MEASURED)
def unsupervised_stop_token(xray: LossXray, batch: BatchFacts) -> Answer:
    """The end token stands at the end of trained text but is never a target: the model does not learn to stop.

    ## What it finds
    Positions e with ids[e] an end token that is no padding, where ids[e - 1] is trained as a target and ids[e] is not, at every such
    end of the batch.

    ## Why it matters
    The model answers and then goes on to the length limit. The training loss shows nothing.

    ## When it is not a problem
    Another stop token (`<|im_end|>`) just before it is trained; texts that were cut and carry no end token; end tokens inside
    a prompt.

    ## How to confirm by hand
    `(labels == eos_token_id).sum()` is 0 while `((input_ids == eos_token_id) & (attention_mask == 1)).sum()` is not.

    ## How to fix
    Give padding an id of its own, or mask labels by the attention mask instead of by the pad id:
    `labels[attention_mask == 0] = -100`.

    ## Options
    None.

    ## References
    None.
    """
    refused = no_answer(xray, signed=True)
    if refused:
        return Unknown(reason=refused)
    if not batch.eos_ids:
        return Unknown(reason="no end token is known: neither tokenizer nor config names one")
    shift = measure_shift(xray, batch)
    offset = likely_offset(shift, batch)
    if offset == 0:
        return NotApplicable(reason="positions predict their own token, not the next one")
    targets = {(c.example, c.source): c.target for c in counted(xray, offset) if c.source is not None}
    padding = None if batch.padding_BT is None else batch.padding_BT.tolist()
    missed, trained = [], 0
    for b, ids in enumerate(batch.ids_BT.tolist()):
        for e in range(offset, len(ids)):
            if ids[e] not in batch.eos_ids or (padding is not None and padding[b][e]) or ids[e - 1] in batch.eos_ids:
                continue
            if (b, e) in targets:
                trained += 1
            elif (b, e - 1) in targets:
                near = {targets.get((b, p)) for p in range(max(0, e - 3), e)}
                if near & (batch.special_ids - set(batch.eos_ids)):
                    trained += 1
                else:
                    missed.append((b, e, ids[e]))
    if trained or not missed:
        power = Power(quantity="ends of trained text", smallest_detectable=1, unit="ends")
        if not trained:
            return NotApplicable(reason="no trained text of this batch ends with an end token")
        return answer((), power=power, reason=f"{trained} of {trained + len(missed)} ends are trained")
    b, e, token = missed[0]
    same = f" The pad id is the end token's own ({token}), and labels are masked by it." if batch.pad_id == token else ""
    return answer(
        [
            Finding(
                message=f"the end token {token} is never a target: at all {len(missed)} ends of trained text in this batch the token "
                f"before it is trained and it is not (the first is position {e} of example {b}).{same} The model will not learn to "
                "stop. Mask labels where attention_mask == 0 instead of where the id is the pad id.",
                where=Where(example=b, position=e, token_id=token),
                measured=Quantity(value=0, unit="end tokens trained"),
                expected=Quantity(value=len(missed), unit="end tokens trained"),
                remedy="labels[attention_mask == 0] = -100  # and leave the end token in",
            )
        ]
    )
