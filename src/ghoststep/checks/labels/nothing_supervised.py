"""GS207."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.loss import LossKind, LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, Unknown, answer, check


@check(code="GS207", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("nonfinite-loss",))
def nothing_supervised(xray: LossXray, batch: BatchFacts | Missing) -> Answer:
    """No position of a batch, or of some of its examples, carries loss: nothing is trained there.

    ## What it finds
    d loss / d logits is 0 (or not a number) at every position of the first batch, [B, T]; or a batch of the setup whose labels
    are all negative. Examples of the first batch without any loss beside others that have it: a warning from one half of them on,
    else a note.

    ## Why it matters
    The mean over no tokens is NaN, or a loop that guards against it logs 0.0. Nothing is learnt from such a batch, and a NaN
    that reaches the weights ends the run.

    ## When it is not a problem
    A loss of exactly 0 from groups of equal reward in policy optimisation: there the batch carries no signal by design. Examples
    that weights or rewards leave out (`intent="rl"`, weighted losses).

    ## How to confirm by hand
    `(labels != -100).sum()` is 0.

    ## How to fix
    Usually a marker that is searched for in the token ids never occurs because it is tokenized differently inside a text: tokenize
    it as it stands there (with the space before it), or compute the mask from character offsets. Else the answer was truncated
    away: raise the maximum length, or drop such examples.

    ## Options
    None.

    ## References
    None.
    """
    counts = batch.supervised_per_batch if isinstance(batch, BatchFacts) else ()
    empty = [i for i, n in enumerate(counts) if n == 0]
    power = Power(quantity="supervised positions in a batch", smallest_detectable=1, unit="positions")
    if xray.kind is not LossKind.NOTHING and not empty:
        return answer(_examples_left_out(xray, batch), power=power)
    if isinstance(batch, BatchFacts) and batch.intent == "rl" and xray.loss == 0:
        return answer((), power=power, reason="a loss of 0 without gradient: groups of equal reward")
    if xray.kind is LossKind.NOTHING and xray.num_nonfinite and not empty:
        return Unknown(reason=f"the gradient at {xray.num_nonfinite} positions is not a number (see nonfinite-loss)")
    every = bool(counts) and len(empty) == len(counts)
    if xray.kind is LossKind.NOTHING:
        labels = (
            f"every label in {'every batch' if every else f'{len(empty)} of {len(counts)} batches'} is negative"
            if empty
            else "labels exist, but none of them reaches the loss"
            if counts
            else "no label reaches the loss"
        )
        cause = (
            f"nothing is supervised: no position of the first batch has a gradient, and its loss is {xray.loss:.4g}; {labels}."
        )
        severity = Severity.ERROR
    else:
        cause = f"{len(empty)} of {len(counts)} batches have no label at all (the first is batch {empty[0]})."
        severity = Severity.WARNING
    where = Where(micro_batch=0 if xray.kind is LossKind.NOTHING else empty[0])
    return answer(
        [
            Finding(
                message=f"{cause} The mean over no tokens is NaN, and nothing is learnt. Look at how labels are masked: a marker "
                "that is tokenized on its own often differs from the same text inside a sentence; or the answer was cut off.",
                where=where,
                measured=Quantity(value=0, unit="supervised positions"),
                expected=Quantity(value=1, unit="supervised positions"),
                severity=severity,
                remedy="mask labels by character offsets (return_offsets_mapping=True) instead of by token ids",
            )
        ]
    )


def _examples_left_out(xray: LossXray, batch: BatchFacts | Missing) -> list[Finding]:
    """Examples of at least two real tokens where no position carries loss, beside others where some do."""
    plain = xray.kind in (LossKind.HARD, LossKind.SMOOTHED, LossKind.SOFT)
    if not plain or isinstance(batch, Missing) or batch.intent == "rl" or xray.further or xray.num_nonfinite:
        return []
    real_BT = batch.ids_BT >= 0 if batch.padding_BT is None else ~batch.padding_BT
    texts = [b for b in range(len(real_BT)) if int(real_BT[b].sum()) >= 2]
    trained = {tuple(batch.ids_BT[b].tolist()) for b in texts if xray.weight_BT[b].any()}
    # A loss may call the model a second time on the same texts (for a metric, as a frozen copy of itself).
    without = [b for b in texts if not xray.weight_BT[b].any() and tuple(batch.ids_BT[b].tolist()) not in trained]
    texts = [b for b in texts if b in without or xray.weight_BT[b].any()]
    if not without or len(without) == len(texts):
        return []
    named = ", ".join(map(str, without[:8])) + (", ..." if len(without) > 8 else "")
    labels = batch.labels_BT
    cause = " (all of their labels are negative)" if labels is not None and not (labels[without] >= 0).any() else ""
    return [
        Finding(
            message=f"{len(without)} of {len(texts)} examples of the first batch carry no loss at all{cause}: {named}. They cost a "
            "forward and a backward and teach nothing. Look at how their labels are masked, and whether their answers were cut off.",
            where=Where(example=without[0], micro_batch=0),
            measured=Quantity(value=len(without), unit="examples without loss"),
            expected=Quantity(value=0, unit="examples without loss"),
            severity=Severity.WARNING if 2 * len(without) >= len(texts) else Severity.NOTE,
            basis=Basis.MEASURED,
            remedy="mask labels by character offsets, and drop examples whose answer is cut off",
        )
    ]
