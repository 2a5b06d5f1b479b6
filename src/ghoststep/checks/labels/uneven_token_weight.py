"""GS206."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.loss import LossXray, UnevenTrial, WeightAcrossMicroBatches
from ghoststep.finding import Basis, Finding, Outcome, Power, Quantity, Severity, Where
from ghoststep.label_shift import no_answer
from ghoststep.registry import Answer, Unknown, answer, check

_NOT_TRIED = Missing(reason="not tried")


@check(code="GS206", severity=Severity.WARNING, basis=Basis.MEASURED)
def uneven_token_weight(
    xray: LossXray,
    window: WeightAcrossMicroBatches | Missing,
    trial: UnevenTrial | Missing = _NOT_TRIED,
    *,
    tolerated_ratio: float = 1.05,
) -> Answer:
    """A token counts more in a short example or micro-batch than in a long one (a mean of means).

    ## What it finds
    w[b, t] = d loss / d log p of the target. Within an example all tokens weigh the same, but examples (or micro-batches of one
    accumulation window) weigh their tokens by 1 / their own number of tokens, and these numbers differ. Where the examples have
    equal numbers, half of the labels of one are left out in a copy of the batch and the weights are read again: a mean of means is
    a note then.

    ## Why it matters
    The step is not the gradient of the mean loss over tokens: short answers are over-weighted by the ratio of the counts, and the
    loss no longer agrees with one large batch. With accumulation the same data gives another model for another micro-batch size.

    ## When it is not a problem
    Equal numbers of tokens; sum-reduced losses; tokens weighted on purpose within an example; a deliberate mean over examples, as
    some preference losses use it (accept the finding then). Models of transformers whose loss takes `num_items_in_batch`, trained
    by its Trainer, which hands them the window's count: without `loss_fn` or `train_step` both ways are measured, and where they
    differ the answer is unknown.

    ## How to confirm by hand
    Compare the gradient of one large batch with the accumulated one.

    ## How to fix
    Sum the token losses and divide by the number of tokens of the whole window: `num_items_in_batch` in transformers' Trainer, or
    `loss_sum / tokens_in_window` in a loop of one's own, with the count put into each batch, where `loss_fn` finds it.

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
    undecided, reasons = [], []
    counts = {n for n in (sum(1 for w in row if w) for row in xray.weight_BT.tolist()) if n}
    if len(counts) < 2 and len(xray.weight_BT) > 1:
        if isinstance(trial, Missing):
            why = "" if trial is _NOT_TRIED or trial.is_absent else f" ({trial.reason})"
            undecided.append(f"the examples have equal numbers of trained tokens, so their weights cannot be told apart{why}")
        else:
            findings += _by_trial(trial, tolerated_ratio)
            reasons.append(
                f"with half of the labels of example {trial.example} left out, its tokens weigh {trial.ratio:.3g} of the others'"
            )
    if isinstance(window, Missing):
        if window.outcome is Outcome.UNKNOWN and not window.is_absent:
            undecided.append(window.reason)
    elif window.accumulation_steps > 1:
        found, open_question, said = _window(window, tolerated_ratio)
        findings += found
        undecided += open_question
        reasons += said
    return answer(findings, power=power, reason="; ".join(reasons) or None, undecided="; ".join(undecided) or None)


def _window(window: WeightAcrossMicroBatches, tolerated: float) -> tuple[list[Finding], list[str], list[str]]:
    """Findings, open questions and reasons of a clear about the micro-batches of a window."""
    pairs = [(w, n) for w, n in zip(window.weights, window.num_tokens, strict=True) if n]
    if len({n for _, n in pairs}) < 2:
        if window.all_trained:
            return [], [], ["all positions of each micro-batch are trained, so that their numbers of tokens are equal"]
        return [], ["the micro-batches have equal numbers of tokens, so their weights cannot be told apart"], []
    found = _across_window(pairs, window, tolerated)
    counted = list(zip(window.counted_weights, window.num_tokens, strict=True)) if found and window.counted_weights else []
    if not counted or _across_window([(w, n) for w, n in counted if n], window, tolerated):
        return found, [], []
    ratio = found[0].measured.value if found[0].measured is not None else 0
    question = (
        f"the setup does not say how the window is divided: model(**batch).loss averages each micro-batch over its own tokens (a "
        f"token weighs up to {ratio} times another); with num_items_in_batch, which transformers' Trainer passes, all weigh the same. "
        "With a loop of your own give loss_fn or train_step; for Trainer put the window's count into the batches as "
        "num_items_in_batch"
    )
    return [], [question], []


def _by_trial(trial: UnevenTrial, tolerated: float) -> list[Finding]:
    fair = trial.num_others / trial.num_tokens
    if trial.ratio <= tolerated or abs(trial.ratio / fair - 1) > 0.02:
        return []
    return [
        Finding(
            message=f"the loss is a mean of means over examples: with half of the labels of example {trial.example} left out, each "
            f"of its {trial.num_tokens} tokens weighs {trial.ratio:.2f} times one of the others. The examples of this batch have "
            "equal numbers of tokens, so nothing is uneven here; batches of other lengths will be.",
            where=Where(example=trial.example),
            measured=Quantity(value=round(trial.ratio, 4), unit="ratio of token weights"),
            expected=Quantity(value=1, unit="ratio of token weights"),
            severity=Severity.NOTE,
            remedy="loss = token_losses.sum() / num_tokens",
        )
    ]


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
            remedy="loss = token_losses.sum() / tokens_in_window  # put the count into each batch, where loss_fn finds it",
        )
    ]
