"""GS408."""

import math
from collections.abc import Sequence

from ghoststep.evidence.steps import HISTORY, RankRecord, RunRecord, Step
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check
from ghoststep.step_comparison import not_compared
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

START_STEPS = 20
"""Steps from which a beginning is judged."""
LEAST_MOVED = 0.2
"""Change over norm of the sampled weights in one step. AdamW at a learning rate of 1e-3 moves weights of size 0.02 by 0.05; of small
language models, those that moved by 0.15 in their first steps still learned, and of those that diverged every one moved by more than
0.25. What grows while the weights move little (a value loss, a KL term that starts at 0) has another cause than an update."""
START_IN_A_ROW = 16
"""A large first step may lift the loss a hundredfold in a run that then finds its way (a catapult): that took at most 15 steps."""
START_FACTOR = 3.0
"""Median of these steps over the highest loss before the update. From a fresh start a loss rises by a tenth, from ln(classes)."""
START_LEAST = 2.0
"""Each of these steps over the same: where a first batch is an easy one by chance, some of 16 later ones are nearly as easy."""
SINGLE_FACTOR = 10.0
"""Of the highest loss before: losses of single examples spread by a factor of e (one standard deviation) and stay under it."""


@check(code="GS408", severity=Severity.WARNING, basis=Basis.MEASURED)
def loss_spike(run: RunRecord) -> Answer:
    """The loss jumped far above its own history and stayed there, together with the gradient norm.

    ## What it finds
    Four steps in a row whose loss lies above the highest of the (64 to 256) steps before by more than their whole range, and by at
    least 0.1, with a gradient norm of 5 medians in one of them. In the first 64 steps: 16 in a row whose loss is twice the
    highest one before, and 3 times in half of them, after an update that moved the weights by a fifth of their norm or more, with
    that gradient norm. As a note: one to three steps at ten times the highest loss of at least 64 steps before.

    ## Why it matters
    The update before it threw the weights out of place. Some runs come back after hundreds of steps, some never do; a log that
    averages over many steps shows a bump. A single step far above is mostly a spoilt batch.

    ## When it is not a problem
    A single hard batch. A new data set or a longer context raises the loss without a jump of the gradient norm, or with more
    tokens a step. Losses that are not positive throughout (policy gradients) or start near 0 are not judged, nor is a rise within
    the first 64 steps that comes back within 16 or that no large update caused (the growing loss of a value function).

    ## How to confirm by hand
    Loss and gradient norm of every step around the named one.

    ## How to fix
    Go back to a checkpoint before it and skip its batches, lower the learning rate or beta2, clip the gradient. At the beginning:
    a learning rate several times smaller, or a warm-up.

    ## Options
    None.

    ## References
    None.
    """
    refused = refusal(run, "loss", "norm", at_least=START_STEPS)
    if refused:
        return Unknown(reason=refused)
    is_short = refusal(run, "loss", "norm", at_least=LEAST_HISTORY + IN_A_ROW)
    start_unseen = refusal(run, "moved")
    if is_short and start_unseen:
        return Unknown(reason=f"{is_short}; its beginning: {start_unseen}")
    findings: list[Finding] = []
    for record, stretch in all_stretches(run):
        findings += _of_stretch(record, stretch)
    rest = not_compared(run, ("loss", "norm"))
    if not findings and not rest.undecided and all(_is_of_policy(r) for r in run.ranks):
        return NotApplicable(
            reason="the loss is not above 0 in half of the steps or more (as that of a policy): it has no level that a rise could be "
            "compared with"
        )
    limit = f"a rise within the first {LEAST_HISTORY} steps counts after an update by {LEAST_MOVED:g} of the weights' norm only"
    if start_unseen:
        limit = f"a rise within the first {LEAST_HISTORY} steps is not judged ({start_unseen})"
    if is_short:
        limit += ", and only such a one was looked for, in so few steps"
    limit += "; losses not above 0 are not judged"
    return answer(
        findings,
        power=_power(is_short=bool(is_short)),
        reason=f"{looked_at(run)}; {limit}{rest.note}",
        undecided=rest.undecided,
    )


def _is_of_policy(record: RankRecord) -> bool:
    losses = _losses(record.steps)
    return 2 * sum(x <= 0 for x in losses) >= len(losses)


def _power(*, is_short: bool) -> Power:
    if is_short:
        times = f"rise over the first losses, for {counted(START_IN_A_ROW, 'step')} in a row"
        return Power(quantity=times, smallest_detectable=START_FACTOR)
    return Power(quantity="rise over the range of the steps before, for four steps in a row", smallest_detectable=2.0)


def _of_stretch(record: RankRecord, stretch: Stretch) -> list[Finding]:
    losses = [s.loss if s.loss is not None else math.nan for s in stretch.steps]
    spikes = _spikes(stretch, losses)
    start = _diverged_at_start(stretch, losses)
    findings: list[Finding] = []
    if start is not None:
        update, first = start
        # One divergence is told once. Whichever of the two rules was complete first tells it, so that a live run and its record agree.
        if not any(i + IN_A_ROW <= first + START_IN_A_ROW for i in spikes):
            spikes = [i for i in spikes if i >= first + LEAST_HISTORY]
            findings.append(_start_finding(record, stretch, update, first))
    findings += [_finding(record, stretch, i) for i in spikes]
    return [*findings, *(_single_finding(record, stretch, i, n) for i, n in _singles(stretch, losses))]


def _spikes(stretch: Stretch, losses: Sequence[float]) -> list[int]:
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


def _is_spike(stretch: Stretch, losses: Sequence[float], i: int) -> bool:
    low_of_spike = min(losses[i : i + IN_A_ROW])
    if not all(low_of_spike > losses[i - k] for k in _BACK):
        return False
    level = _level(losses, i)
    if level is None or not low_of_spike > level:
        return False
    history = stretch.history(i)
    norms = [s.norm for s in history if s.norm]
    peak = max((s.norm for s in stretch.steps[i - 1 : i + IN_A_ROW] if s.norm), default=0.0)
    return (
        len(norms) >= LEAST_HISTORY
        and peak >= GRADIENT_FACTOR * median(norms)
        and not _has_more_tokens(stretch.steps[i : i + IN_A_ROW], history)
    )


def _level(losses: Sequence[float], i: int) -> float | None:
    """What a loss must exceed at this step to be out of its history; None where there is too little, or one not above 0."""
    before = [x for x in losses[max(0, i - HISTORY) : i] if math.isfinite(x)]
    if len(before) < LEAST_HISTORY or min(before) <= 0:
        return None
    return max(before) + max(max(before) - min(before), LEAST_RISE)


def _has_more_tokens(steps: Sequence[Step], before: Sequence[Step]) -> bool:
    return median(s.num_tokens for s in steps) > MORE_TOKENS * median(s.num_tokens for s in before)


def _diverged_at_start(stretch: Stretch, losses: Sequence[float]) -> tuple[int, int] | None:
    """The update that threw the weights out of place, and the first of the steps whose loss stayed far above all up to it."""
    if not stretch.is_whole:
        return None
    opening = stretch.steps[:LEAST_HISTORY]
    update = next((i for i, s in enumerate(opening) if s.moved is not None and s.moved >= LEAST_MOVED), None)
    if update is None:
        return None
    before = [x for x in losses[: update + 1] if math.isfinite(x)]
    norms = [s.norm for s in opening[: update + 1] if s.norm and s.norm < math.inf]
    if not before or not norms or min(before) <= 0 or max(before) < LEAST_RISE:
        return None
    top, usual = max(before), median(norms)
    for i in range(update + 1, min(LEAST_HISTORY, len(losses) - START_IN_A_ROW + 1)):
        now = losses[i : i + START_IN_A_ROW]
        if not START_LEAST * top < now[0] < math.inf or not all(START_LEAST * top < x < math.inf for x in now):
            continue
        steps = stretch.steps[i : i + START_IN_A_ROW]
        peak = max((s.norm for s in stretch.steps[update + 1 : i + START_IN_A_ROW] if s.norm), default=0.0)
        is_far = median(now) > max(START_FACTOR * top, top + LEAST_RISE) and peak >= GRADIENT_FACTOR * usual
        if is_far and not _has_more_tokens(steps, opening[: update + 1]):
            return update, i
    return None


def _singles(stretch: Stretch, losses: Sequence[float]) -> list[tuple[int, int]]:
    """Steps far above everything before, with the number of steps until the loss was back: 1 to 3, otherwise it is no single one."""
    found = []
    for i in range(max(stretch.first, LEAST_HISTORY), len(losses) - 1):
        if not losses[i] > SINGLE_FACTOR * losses[i - 1] or losses[i] == math.inf:
            continue
        level = _level(losses, i)
        if level is None or not losses[i] > max(level, SINGLE_FACTOR * _top(losses, i)):
            continue
        back = next((k for k, x in enumerate(losses[i + 1 : i + IN_A_ROW], 1) if not x > level), None)
        is_back = back is not None and math.isfinite(losses[i + back])  # what follows NaN is told elsewhere
        if back is not None and is_back and not _has_more_tokens(stretch.steps[i : i + back], stretch.history(i)):
            found.append((i, back))
    return found


def _top(losses: Sequence[float], i: int) -> float:
    return max(x for x in losses[max(0, i - HISTORY) : i] if math.isfinite(x))


def _finding(record: RankRecord, stretch: Stretch, i: int) -> Finding:
    step = stretch.steps[i]
    history = stretch.history(i)
    peak = max(s.norm or 0.0 for s in stretch.steps[i - 1 : i + IN_A_ROW])
    reached, top = median(_losses(stretch.steps[i : i + IN_A_ROW])), max(_losses(history))
    return Finding(
        message=f"the loss jumped in step {step.number}: {reached:.4g} for {counted(IN_A_ROW, 'step')} in a row, where the "
        f"{len(history)} before had a median of {median(_losses(history)):.4g} and never more than {top:.4g}; the gradient norm "
        f"reached {peak:.3g} (usual: {median(s.norm for s in history if s.norm):.3g}). An update before it threw the weights out of "
        "place. Go back to an earlier checkpoint and skip these batches, or lower the learning rate.",
        where=Where(step=step.number, rank=record.facts.rank),
        measured=Quantity(value=reached, unit="loss"),
        expected=Quantity(value=top, unit="loss, at most"),
    )


def _losses(steps: Sequence[Step]) -> list[float]:
    return [s.loss for s in steps if s.loss is not None and math.isfinite(s.loss)]


def _start_finding(record: RankRecord, stretch: Stretch, update: int, first: int) -> Finding:
    before, guilty = stretch.steps[: update + 1], stretch.steps[update]
    now = _losses(stretch.steps[first : first + START_IN_A_ROW])
    top = max(_losses(before))
    peak = max(s.norm for s in stretch.steps[update + 1 : first + START_IN_A_ROW] if s.norm)
    rate = f" at a learning rate of {max(guilty.lrs):.3g}" if guilty.lrs else ""
    return Finding(
        message=f"the loss diverged at the beginning: the update of step {guilty.number} changed the weights by "
        f"{guilty.moved or 0:.2g} times their norm{rate}. Up to it the loss was {top:.4g} at most, and from step "
        f"{stretch.steps[first].number} on it stayed above {min(now):.4g} for {counted(START_IN_A_ROW, 'step')} in a row (median "
        f"{median(now):.4g}); the gradient norm reached {peak:.3g} (before: {median(s.norm for s in before if s.norm):.3g}). Start "
        "again with a learning rate several times smaller, or with a warm-up.",
        where=Where(step=stretch.steps[first].number, rank=record.facts.rank),
        measured=Quantity(value=median(now), unit="loss"),
        expected=Quantity(value=top, unit="loss, at most"),
    )


def _single_finding(record: RankRecord, stretch: Stretch, i: int, num_steps: int) -> Finding:
    step, history = stretch.steps[i], stretch.history(i)
    loss, top = step.loss or 0.0, max(_losses(history))
    since = "it was back in the next step" if num_steps == 1 else f"it was back after {counted(num_steps, 'step')}"
    norm = (
        ""
        if step.norm is None
        else f"; its gradient norm is {step.norm:.3g} (usual: {median(s.norm for s in history if s.norm):.3g})"
    )
    return Finding(
        message=f"the loss of step {step.number} is {loss:.4g}, where the {len(history)} before never had more than {top:.4g} (median "
        f"{median(_losses(history)):.4g}); {since}{norm}. Look at its batch: spoilt text, labels that do not belong to it, another "
        f"scale. Where the watch had a run folder, `ghoststep check RUN --step {step.number}` finds it.",
        where=Where(step=step.number, rank=record.facts.rank),
        measured=Quantity(value=loss, unit="loss"),
        expected=Quantity(value=top, unit="loss, at most"),
        severity=Severity.NOTE,
    )
