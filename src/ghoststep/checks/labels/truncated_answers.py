"""GS210."""

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.label_shift import counted, likely_offset, measure_shift, no_answer
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS210", severity=Severity.WARNING, basis=Basis.MEASURED)
def truncated_answers(xray: LossXray, batch: BatchFacts, *, warning_share: float = 0.5, note_share: float = 0.1) -> Answer:
    """Answers are cut off at the maximum length, and the model is trained on ends that are none.

    ## What it finds
    Examples with a prompt that is not trained and an answer that is, which fill the whole length T and whose last token is trained
    but is no stop token: their share of such examples.

    ## Why it matters
    The model learns to stop in the middle of a sentence, or never sees the stop token; long answers lose their conclusion.

    ## When it is not a problem
    Pretraining on packed pieces of a stream (no prompt is left out of the loss there); a few over-long examples.

    ## How to confirm by hand
    Decode the last 20 tokens of the longest examples.

    ## How to fix
    Raise the maximum length, drop over-long examples, or cut the prompt instead of the answer.

    ## Options
    `warning_share`: share of truncated answers from which it is a warning, 0.5. `note_share`: from which it is a note, 0.1.

    ## References
    The shares are judgement: below one half some loss of long answers may be accepted knowingly.
    """
    refused = no_answer(xray, signed=True)
    if refused:
        return Unknown(reason=refused)
    offset = likely_offset(measure_shift(xray, batch), batch)
    own = offset == 0 or batch.intent == "masked"
    if own or batch.document_BT is not None:
        return NotApplicable(reason="positions predict their own token" if own else "several documents an example")
    if not batch.eos_ids:
        return Unknown(reason="no end token is known: neither tokenizer nor config names one")
    padding = None if batch.padding_BT is None else batch.padding_BT.tolist()
    stops = set(batch.eos_ids) | set(batch.special_ids)
    targets = {(c.example, c.source) for c in counted(xray, offset) if c.source is not None}
    answers, cut = 0, []
    for b, ids in enumerate(batch.ids_BT.tolist()):
        real = [t for t in range(len(ids)) if ids[t] >= 0 and (padding is None or not padding[b][t])]
        trained = [t for t in real if (b, t) in targets]
        if not trained or trained[0] - real[0] < 2:
            continue  # nothing of a prompt stays out of the loss
        answers += 1
        if len(real) == len(ids) and trained[-1] == real[-1] and ids[real[-1]] not in stops:
            cut.append(b)
    if not answers:
        return NotApplicable(reason="no example has a prompt that is left out of the loss")
    share = len(cut) / answers
    power = Power(quantity="share of truncated answers", smallest_detectable=note_share)
    if len(cut) < 2 or share < note_share:
        return answer((), power=power, reason=f"{len(cut)} of {answers} answers end at the full length without a stop token")
    last = batch.ids_BT.shape[1] - 1
    return answer(
        [
            Finding(
                message=f"{len(cut)} of {answers} answers fill all {last + 1} tokens and end without a stop token: they "
                f"were cut off, and the cut is trained (the first is example {cut[0]}). Raise the maximum length, drop such "
                "examples, or cut prompts instead.",
                where=Where(example=cut[0], position=last),
                measured=Quantity(value=round(share, 4), unit="share of answers"),
                expected=Quantity(value=note_share, unit="share of answers"),
                severity=Severity.WARNING if share >= warning_share else Severity.NOTE,
            )
        ]
    )
