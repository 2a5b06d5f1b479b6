"""GS408."""

import math

from ghoststep.evidence.steps import HISTORY, RankRecord, RunRecord, Step
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.step_findings import Stretch, all_stretches, looked_at, median, refusal

LEAST_HISTORY = 64
IN_A_ROW = 4
"""Steps one after the other above everything before: four of them by chance alone are (1/64)^4."""
LEAST_RISE = 0.1
"""In units of the loss: what a rise must have at least, so that losses near 0 (policies) do not count."""
GRADIENT_FACTOR = 5.0
"""Of the median gradient norm, reached by one of these steps: a harder data set raises the loss without it."""
MORE_TOKENS = 1.5
_BACK = (1, 2, 3, 5, 9)


@check(code="GS408", severity=Severity.WARNING, basis=Basis.MEASURED)
def loss_spike(run: RunRecord) -> Answer:
    """The loss jumped far above its own history and stayed there, together with the gradient norm.

    ## What it finds
    Four steps in a row whose loss lies above the highest of the (64 to 256) steps before by more than their whole range, and by at
    least 0.1, with a gradient norm of 5 medians in one of them.

    ## Why it matters
    The update before it threw the weights out of place. Some runs come back after hundreds of steps, some never do; a log that
    averages over many steps shows a bump.

    ## When it is not a problem
    A single hard batch. A new data set or a longer context raises the loss without a jump of the gradient norm, or with more
    tokens a step. Losses that are not positive throughout (policy gradients) are not judged, nor is a rise within the first 64 steps.

    ## How to confirm by hand
    Loss and gradient norm of every step around the named one.

    ## How to fix
    Go back to a checkpoint before it and skip its batches, lower the learning rate or beta2, clip the gradient.

    ## Options
    None.

    ## References
    None.
    """
    refused = refusal(run, "loss", "norm", at_least=LEAST_HISTORY + IN_A_ROW)
    if refused:
        return Unknown(reason=refused)
    findings = []
    for record, stretch in all_stretches(run):
        findings += [_finding(record, stretch, i) for i in _spikes(stretch)]
    power = Power(quantity="rise over the range of the steps before", smallest_detectable=2.0)
    # A learning rate far too large throws the loss up at once: that is history then, and must not read as a healthy run.
    limit = f"a loss that diverged within its first {LEAST_HISTORY} steps, or is not above 0, is not judged"
    return answer(findings, power=power, reason=f"{looked_at(run)}; {limit}")


def _spikes(stretch: Stretch) -> list[int]:
    losses = [s.loss if s.loss is not None else math.nan for s in stretch.steps]
    found: list[int] = []
    after = -1
    for i in range(max(stretch.first, LEAST_HISTORY), len(losses) - IN_A_ROW + 1):
        x = losses[i] - LEAST_RISE
        # Cheap questions first: it must lie above each step before, and so must the next ones.
        if not (x > losses[i - 1] and x > losses[i - 2] and x > losses[i - 5] and losses[i + 1] > losses[i - 1]):
            continue
        if i >= after and _is_spike(stretch, losses, i):
            found.append(i)
            after = i + LEAST_HISTORY
    return found


def _is_spike(stretch: Stretch, losses: list[float], i: int) -> bool:
    low_of_spike = min(losses[i : i + IN_A_ROW])
    if not all(low_of_spike > losses[i - k] for k in _BACK):
        return False
    before = [x for x in losses[max(0, i - HISTORY) : i] if math.isfinite(x)]
    if len(before) < LEAST_HISTORY or min(before) <= 0:
        return False
    top = max(before)
    if not low_of_spike > top + max(top - min(before), LEAST_RISE):
        return False
    history = stretch.history(i)
    norms = [s.norm for s in history if s.norm]
    peak = max((s.norm for s in stretch.steps[i - 1 : i + IN_A_ROW] if s.norm), default=0.0)
    tokens = median(s.num_tokens for s in stretch.steps[i : i + IN_A_ROW])
    has_more = tokens > MORE_TOKENS * median(s.num_tokens for s in history)
    return len(norms) >= LEAST_HISTORY and peak >= GRADIENT_FACTOR * median(norms) and not has_more


def _finding(record: RankRecord, stretch: Stretch, i: int) -> Finding:
    step: Step = stretch.steps[i]
    history = stretch.history(i)
    usual = median(s.loss for s in history if s.loss is not None)
    peak = max(s.norm or 0.0 for s in stretch.steps[i - 1 : i + IN_A_ROW])
    reached = median(s.loss or 0.0 for s in stretch.steps[i : i + IN_A_ROW])
    top = max(s.loss for s in history if s.loss is not None)
    return Finding(
        message=f"the loss jumped in step {step.number}: {reached:.4g} for {counted(IN_A_ROW, 'step')} in a row, where the "
        f"{len(history)} before had a median of {usual:.4g} and never more than {top:.4g}; the gradient norm reached {peak:.3g} "
        f"(usual: {median(s.norm for s in history if s.norm):.3g}). An update before it threw the weights out of place. Go back to "
        "an earlier checkpoint and skip these batches, or lower the learning rate.",
        where=Where(step=step.number, rank=record.facts.rank),
        measured=Quantity(value=reached, unit="loss"),
        expected=Quantity(value=top, unit="loss, at most"),
    )
