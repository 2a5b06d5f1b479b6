"""GS206."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.loss import LossXray, WeightAcrossMicroBatches
from ghoststep.finding import Basis, Finding, Outcome, Power, Quantity, Severity, Where
from ghoststep.label_shift import no_answer
from ghoststep.registry import Answer, Unknown, answer, check


@check(code="GS206", severity=Severity.WARNING, basis=Basis.MEASURED)
def uneven_token_weight(xray: LossXray, window: WeightAcrossMicroBatches | Missing, *, tolerated_ratio: float = 1.05) -> Answer:
    """A token counts more in a short example or micro-batch than in a long one (a mean of means).

    ## What it finds
    w[b, t] = d loss / d log p of the target. Within an example all tokens weigh the same, but examples (or micro-batches of one
    accumulation window) weigh their tokens by 1 / their own number of tokens, and these numbers differ.

    ## Why it matters
    The step is not the gradient of the mean loss over tokens: short answers are over-weighted by the ratio of the counts, and the
    loss no longer agrees with one large batch. With accumulation the same data gives another model for another micro-batch size.

    ## When it is not a problem
    Equal numbers of tokens (no difference, and nothing can be told: unknown); sum-reduced losses; tokens weighted on purpose within an
    example; a deliberate mean over examples, as some preference losses use it (accept the finding then).

    ## How to confirm by hand
    Compare the gradient of one large batch with the accumulated one.

    ## How to fix
    Sum the token losses and divide by the number of tokens of the whole window: `num_items_in_batch` in transformers' Trainer, or
    `loss_sum / tokens_in_window` in a loop of one's own.

    ## Options
    `tolerated_ratio`: largest ratio of token weights that is accepted, 1.05 by default.

    ## References
    None.
    """
    refused = no_answer(xray)
    if refused:
        return Unknown(reason=refused)
    power = Power(quantity="ratio of token weights", smallest_detectable=tolerated_ratio)
    findings = _across_examples(xray, tolerated_ratio)
    undecided = []
    counts = {n for n in (sum(1 for w in row if w) for row in xray.weight_BT.tolist()) if n}
    if len(counts) < 2 and len(xray.weight_BT) > 1:
        undecided.append("the examples have equal numbers of trained tokens, so their weights cannot be told apart")
    if isinstance(window, Missing):
        if window.outcome is Outcome.UNKNOWN and not window.is_absent:
            undecided.append(window.reason)
    elif window.accumulation_steps > 1:
        pairs = [(w, n) for w, n in zip(window.weights, window.num_tokens, strict=True) if n]
        findings += _across_window(pairs, window, tolerated_ratio)
        if len({n for _, n in pairs}) < 2:
            undecided.append("the micro-batches have equal numbers of tokens, so their weights cannot be told apart")
    return answer(findings, power=power, undecided="; ".join(undecided) or None)


def _across_examples(xray: LossXray, tolerated: float) -> list[Finding]:
    rows = []
    for b, weights in enumerate(xray.weight_BT.tolist()):
        mine = [w for w in weights if w]
        if mine:
            if max(mine) > 1.01 * min(mine):
                return []  # weighted on purpose within an example
            rows.append((b, sum(mine) / len(mine), len(mine)))
    if len({n for _, _, n in rows}) < 2:
        return []
    low, high = min(rows, key=lambda r: r[1]), max(rows, key=lambda r: r[1])
    products = [w * n for _, w, n in rows]
    if high[1] <= tolerated * low[1] or max(products) > 1.02 * min(products):
        return []
    ratio = high[1] / low[1]
    return [
        Finding(
            message=f"the loss is a mean of means over examples: a token of example {high[0]} ({high[2]} trained tokens) weighs "
            f"{ratio:.2f} times one of example {low[0]} ({low[2]} tokens). Sum the token losses of the batch and divide once by "
            "their number.",
            where=Where(example=high[0]),
            measured=Quantity(value=round(ratio, 4), unit="ratio of token weights"),
            expected=Quantity(value=1, unit="ratio of token weights"),
            remedy="loss = token_losses.sum() / num_tokens",
        )
    ]


def _across_window(pairs: list[tuple[float, int]], window: WeightAcrossMicroBatches, tolerated: float) -> list[Finding]:
    if len({n for _, n in pairs}) < 2:
        return []
    low, high = min(pairs), max(pairs)
    products = [w * n for w, n in pairs]
    if low[0] <= 0 or high[0] <= tolerated * low[0] or max(products) > 1.1 * min(products):
        return []
    ratio = high[0] / low[0]
    return [
        Finding(
            message=f"each micro-batch is averaged over its own tokens before {window.accumulation_steps} of them are accumulated: a "
            f"token weighs {ratio:.2f} times as much in a micro-batch of {high[1]} tokens as in one of {low[1]}. Divide the summed "
            "loss by the number of tokens of the whole window.",
            where=Where(micro_batch=window.weights.index(high[0])),
            measured=Quantity(value=round(ratio, 4), unit="ratio of token weights"),
            expected=Quantity(value=1, unit="ratio of token weights"),
            remedy="loss = token_losses.sum() / tokens_in_window",
        )
    ]
