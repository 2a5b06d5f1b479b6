"""Whether the steps of a run change its weights: gradients that never arrive, weights that stand still, updates lost to rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ghoststep.evidence.steps import STUCK_STEPS, RankRecord, RunRecord, Step, StepOutcome
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, Unknown, answer
from ghoststep.step_comparison import not_compared
from ghoststep.step_findings import Stretch, all_stretches, long_runs, looked_at, refusal, stretches

STILL_STEPS = 20
"""Steps in a row without any change from which the weights of a run stand still."""
IDLE_STEPS = 50
"""Steps in a row at a learning rate of 0: a warm-up takes one of them, a loop that runs a little past its schedule a few."""
FULL_RATE = 0.1
"""Of the largest learning rate seen: below it (warm-up, the end of a decay) updates may vanish in a healthy run."""
LEAST_NORM = 1e-6
"""Gradient norm under which a converged run has nothing left to change."""
HALF_RATE = 0.5
"""Of the largest learning rate seen or planned: below it a window's lost updates say little about the run, as for a setup that is
still warming up. Weights that lose half of their updates at a tenth of the rate may have taken nearly all of them before."""
LEAST_MOVED = 6e-8
"""Change over norm below which float32 weights of the usual size keep nothing of an update: half the spacing of its numbers."""
NOT_CONVERGED = 1 / 30
"""Of the largest gradient norm so far: under it a run may have nothing left to learn."""
OVER_STEPS = 128
"""Steps of a run from which a learning rate that is spent in most of them is no end of a schedule."""
ABSENT_STEPS = 20
"""Steps without any gradient, from the first one on: an optimizer that is called before the loop takes one."""


def of_run(run: RunRecord, lost_fraction: float, error_fraction: float) -> Answer:
    """The answer of unchanged-weights about a run."""
    for record in run.ranks:
        absent = _steps_without_gradient(record, is_live=run.is_live)
        if len(absent) >= ABSENT_STEPS:
            return answer([_absent(absent, record)])
    refused = refusal(run, "moved", "norm", "lrs", at_least=STILL_STEPS)
    if refused:
        return Unknown(reason=refused)
    steps = [s for r in run.ranks for s in r.steps]
    if all(s.norm == 0.0 for s in steps):
        number = counted(len({s.number for s in steps}), "step")
        return Unknown(reason=f"every gradient was exactly zero in {number}, before any clipping: nothing was to change")
    lost: list[Finding] = []
    for record, stretch in all_stretches(run):
        base = max((g.initial_lr or g.lr for g in record.facts.groups), default=0.0)
        flags = [s.moved == 0.0 and _had_to_move(s, base) for s in stretch.steps]
        for start, stop in long_runs(stretch, flags, STILL_STEPS):
            most = max((max(s.lrs, default=0.0) for s in stretch.history(start)), default=0.0)
            if max(stretch.steps[start].lrs, default=0.0) >= FULL_RATE * most:
                return answer([_still(stretch.steps[start:stop], record.facts.num_sampled, record.facts.rank)])
        for start, stop in long_runs(stretch, [_has_no_rate(s) for s in stretch.steps], IDLE_STEPS):
            return answer([_idle(stretch.steps[start:stop], record.facts.rank)])
        lost += _lost_updates(stretch, base, lost_fraction, error_fraction, record.facts.rank)
        if not lost and "stuck" not in record.facts.unseen:  # random rounding moves seldom and far
            over = _rate_is_over(stretch)
            still = (
                [] if over else long_runs(stretch, _hardly_moving(stretch, base), STUCK_STEPS)
            )  # so that both are known together
            lost += [_over(stretch.steps, over, record.facts.rank)] if over else []
            lost += [_hardly(stretch.steps[start:stop], record.facts.rank) for start, stop in still]
    if lost:
        return answer([next((f for f in lost if f.severity is Severity.ERROR), lost[0])])
    power = Power(quantity="steps in a row without any change", smallest_detectable=STILL_STEPS, unit="steps")
    blind = next((r.facts.unseen["stuck"] for r in run.ranks if "stuck" in r.facts.unseen), "")
    left_out = not_compared(run, ("moved",))
    reason = f"{looked_at(run)}{left_out.note}" + (f"; updates lost in part are not seen: {blind}" if blind else "")
    return answer((), power=power, reason=reason, undecided=left_out.undecided)


def _steps_without_gradient(record: RankRecord, *, is_live: bool) -> Sequence[Step]:
    """The first steps of a record, as long as not one parameter had a gradient, before them or when the optimizer stepped, and the
    weights stood still. FSDP1 leaves ranks without a part of a small model: not judged."""
    first = next(iter(stretches(record, is_live=is_live)), None)
    if first is None or not first.is_whole or record.facts.parallelism == "FSDP1":
        return ()
    count = 0
    for step in first.steps:
        has_gradient = step.num_gradients or step.norm is not None or step.norm_after is not None
        if has_gradient or step.moved or step.outcome is not StepOutcome.STEPPED:
            break
        count += 1
    return first.steps[:count]


def _absent(steps: Sequence[Step], record: RankRecord) -> Finding:
    """Joint optimizers are only warned of: their other model may train first."""
    facts = record.facts
    num_held = sum(g.num_tensors - g.num_frozen for g in facts.groups)
    is_joint = bool(facts.groups) and num_held != len(facts.trainable)
    message = f"the optimizer took {counted(len(steps), 'step')} in a row, from step {steps[0].number} on, and not one of the "
    watched = f"{len(facts.trainable):,} watched parameters" if len(facts.trainable) > 1 else "watched parameters"
    message += f"{watched} "
    message += "had a gradient (.grad is None) in any of them: nothing is learnt. "
    message += (
        "Either the loss does not depend on this model through autograd (detach(), no_grad(), .item(), a tensor made anew), or "
    )
    message += (
        "backward() runs on another model than the one that is watched (a copy, or one that was loaded or wrapped later). "
    )
    message += "Compute the loss from this model's own output and build the optimizer from the same model's parameters."
    if is_joint:
        message += (
            f" The optimizer's groups hold {num_held} tensors in all: if another model trains first, this ends by itself."
        )
    return Finding(
        message=message,
        where=Where(step=steps[0].number, rank=facts.rank),
        measured=Quantity(value=0, unit="tensors with a gradient"),
        expected=Quantity(value=1, unit="tensors with a gradient, at least"),
        severity=Severity.WARNING if is_joint else Severity.ERROR,
    )


def _lost_updates(stretch: Stretch, base: float, lost_fraction: float, error_fraction: float, rank: int) -> list[Finding]:
    """Windows near the full learning rate in which that share of the pushed 16-bit elements never moved."""
    found = []
    for index, step in enumerate(stretch.steps):
        if step.stuck is None or step.stuck < lost_fraction or index < stretch.first:
            continue
        window = _window(stretch.steps[: index + 1])
        if not window:
            continue
        before = stretch.history(index)
        most = max([base, *(max(s.lrs, default=0.0) for s in before), max(step.lrs, default=0.0)])
        rates = [max(s.lrs, default=0.0) for s in window]
        norms = [s.norm_after if s.norm_after is not None else s.norm for s in window]
        if all(rate >= HALF_RATE * most and rate > 0 for rate in rates) and all(
            n is not None and n > LEAST_NORM for n in norms
        ):
            severity = Severity.ERROR if step.stuck >= error_fraction else Severity.WARNING
            found.append(_lost(window, step.stuck, severity, rank))
    return found


def _window(steps: Sequence[Step]) -> Sequence[Step]:
    """The last steps that were taken, as many as a value of `Step.stuck` is about; () where the record has fewer."""
    taken: list[Step] = []
    for step in reversed(steps):
        if step.outcome is StepOutcome.STEPPED:
            taken.append(step)
        if len(taken) == STUCK_STEPS:
            return taken[::-1]
    return ()


def _lost(window: Sequence[Step], share: float, severity: Severity, rank: int) -> Finding:
    first, last = window[0], window[-1]
    return Finding(
        message=f"of the sampled 16-bit weights that had a gradient in every step from {first.number} to {last.number}, "
        f"{math.floor(100 * share)} % kept one and the same value through all of them, at a learning rate of {max(last.lrs):.3g}: "
        "their updates are smaller than half the spacing of the numbers around them and are lost to rounding, while weights near zero "
        "still move. Keep the weights in float32 and use autocast, or an optimizer with Kahan summation or stochastic rounding.",
        where=Where(step=first.number, rank=rank),
        measured=Quantity(value=share, unit="fraction of elements lost"),
        severity=severity,
        basis=Basis.MEASURED,
        remedy="fp32 master weights",
    )


def _has_no_rate(step: Step) -> bool:
    """A step with gradients at a learning rate of exactly 0 in every group."""
    return step.outcome is StepOutcome.STEPPED and bool(step.norm) and bool(step.lrs) and not any(step.lrs)


def _idle(steps: Sequence[Step], rank: int) -> Finding:
    return Finding(
        message=f"the learning rate of every group was exactly 0 in {counted(len(steps), 'step')} in a row, from step "
        f"{steps[0].number} on: gradients were computed and nothing was learnt from them. If the schedule had ended, training should "
        "have too; if not, look at the number of steps it was built for, and whether a warm-up ever leaves 0.",
        where=Where(step=steps[0].number, rank=rank),
        measured=Quantity(value=len(steps), unit="steps at a learning rate of 0"),
        severity=Severity.WARNING,
    )


def _rate_is_over(stretch: Stretch) -> list[int]:
    """Places of the steps whose gradients were as large as ever and that moved next to nothing, where that is most of a run from its
    beginning on, and the learning rate does not rise any more: a schedule that ended long before. The last steps of any schedule look
    the same, and are few."""
    if not stretch.is_whole or len(stretch.steps) < OVER_STEPS:
        return []
    largest, found = 0.0, []
    for i, s in enumerate(stretch.steps):
        norm = s.norm if s.norm is not None and math.isfinite(s.norm) else 0.0
        largest = max(largest, norm)
        if _hardly_moved(s) and norm > max(LEAST_NORM, NOT_CONVERGED * largest):
            found.append(i)
    if 2 * len(found) <= len(stretch.steps) or max(stretch.steps[found[-1]].lrs) > max(stretch.steps[found[0]].lrs):
        return []
    return found


def _over(steps: Sequence[Step], places: Sequence[int], rank: int) -> Finding:
    first, last = steps[places[0]], steps[places[-1]]
    moved = max(steps[i].moved or 0.0 for i in places)
    return Finding(
        message=f"the weights moved by at most {moved:.1g} of their norm a step in {len(places)} of {counted(len(steps), 'step')}, "
        f"from step {first.number} on, less than float32 numbers can hold ({LEAST_MOVED:g}), although gradients arrived (norm "
        f"{last.norm or 0:.3g}): the learning rate is {max(last.lrs):.2g} by step {last.number} and does not rise. Look at the number "
        "of steps that the schedule was built for, how often it is stepped, and where a resumed one goes on.",
        where=Where(step=first.number, rank=rank),
        measured=Quantity(value=moved, unit="change over norm"),
        expected=Quantity(value=LEAST_MOVED, unit="change over norm, at least"),
        severity=Severity.WARNING,
    )


def _hardly_moving(stretch: Stretch, base: float) -> list[bool]:
    """Steps with gradients as large as ever that moved the weights by less than float32 can hold, whatever the reason."""
    return [
        _hardly_moved(s) and max(s.lrs) >= FULL_RATE * base and _is_as_large_as_ever(s, stretch.history(i))
        for i, s in enumerate(stretch.steps)
    ]


def _hardly_moved(step: Step) -> bool:
    """A step with gradients outside the tables and learning rates above 0 that moved the weights by less than float32 can hold."""
    has_push = step.outcome is StepOutcome.STEPPED and bool(step.trunk_norm) and min(step.lrs, default=0.0) > 0
    return has_push and step.moved is not None and step.moved <= LEAST_MOVED


def _is_as_large_as_ever(step: Step, before: Sequence[Step]) -> bool:
    norm = step.norm
    if norm is None or not LEAST_NORM < norm < math.inf:
        return False
    return norm >= NOT_CONVERGED * max((s.norm for s in before if s.norm is not None and math.isfinite(s.norm)), default=0.0)


def _hardly(steps: Sequence[Step], rank: int) -> Finding:
    first = steps[0]
    moved = max(s.moved or 0.0 for s in steps)
    norm, after, rate = first.norm or 0.0, first.norm_after, max(first.lrs)
    if after is not None and after < 1e-3 * norm:
        bound = "" if first.clip_bound is None else f" to a norm of {first.clip_bound:.3g}"
        cause = f"clipping{bound} left {after / norm:.1g} of each gradient, at a learning rate of {rate:.3g}. "
        cause += "Raise the bound of the clip."
    else:
        cause = f"a learning rate of {rate:.3g} is too small for them. Raise it, or look at what the loss is divided by."
    return Finding(
        message=f"the weights moved by at most {moved:.1g} of their norm a step in {counted(len(steps), 'step')} in a row, from step "
        f"{first.number} on, less than float32 numbers can hold ({LEAST_MOVED:g}), although gradients arrived (norm {norm:.3g}): "
        f"{cause}",
        where=Where(step=first.number, rank=rank),
        measured=Quantity(value=moved, unit="change over norm"),
        expected=Quantity(value=LEAST_MOVED, unit="change over norm, at least"),
        severity=Severity.WARNING,
    )


def _had_to_move(step: Step, base: float) -> bool:
    """A step with a gradient outside the tables (a sample may miss the few rows of a table that train) and a full learning rate."""
    norm = step.norm_after if step.norm_after is not None else step.norm
    return (
        step.outcome is StepOutcome.STEPPED
        and norm is not None
        and LEAST_NORM < norm < math.inf
        and bool(step.trunk_norm)
        and min(step.lrs, default=0.0) > 0
        and max(step.lrs) >= FULL_RATE * base
    )


def _still(steps: Sequence[Step], num_sampled: int, rank: int) -> Finding:
    first = steps[0]
    if all(s.norm_after is None for s in steps):  # no tensor had a gradient any more: `zero_grad` sets them to None
        cause = "every gradient was gone when the optimizer stepped. Call zero_grad before backward or after step, not between."
        remedy = "zero_grad before backward or after step"
    else:
        cause = (
            "the updates are lost to rounding (bf16 weights at a small learning rate), or the optimizer steps other tensors than the "
            "model's. Keep the weights in float32 and use autocast; build the optimizer after the model is in place."
        )
        remedy = "fp32 master weights"
    return Finding(
        message=f"not one of {num_sampled or 'the'} sampled weights changed in {counted(len(steps), 'step')} in a row, from step "
        f"{first.number} on, although gradients arrived (norm {first.norm or 0:.3g}) at a learning rate of {max(first.lrs):.3g}: "
        f"{cause}",
        where=Where(step=first.number, rank=rank),
        measured=Quantity(value=0.0, unit="change over norm"),
        remedy=remedy,
    )
