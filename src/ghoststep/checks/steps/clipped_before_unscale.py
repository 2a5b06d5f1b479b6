"""GS415."""

import math
from collections.abc import Sequence

from ghoststep.evidence.base import Missing
from ghoststep.evidence.steps import HISTORY, RunRecord, Step, StepOutcome
from ghoststep.evidence.training import ClipBound, StepProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check
from ghoststep.step_findings import NO_RUN, all_stretches, long_runs, looked_at, of_either, refusal

TOLERANCE = 1e-3
"""Of the clipped norm: `clip_grad_norm_` adds 1e-6 to it, and fp16 gradients round it by up to 5e-4."""
LEAST_CUT = 2.0
"""How far the clipping must have cut the gradient for its trace to be sure."""
CUT_STEPS = 5
"""Steps of a run in a row: a norm that is at bound / scale by chance, to 1 %, is not so five times."""
RUN_TOLERANCE = 1e-2
"""Of a run's clipped norm: of models with very many tensors a part is measured and one factor carries it over to the others."""
RUN_CUT = 1.5
"""Of a run: below it a gradient that was hardly clipped, or not at all, would look the same."""
MEANT_BOUND = 1e-2
"""Bounds that are meant for a whole model's gradient lie above it. A loop may as well clip scaled gradients to bound * scale, which is
right and leaves the same trace while the scale stands still: what is left of the bound, over the scale, tells the two apart."""
FULL_BOUND = 1.0
"""A bound that is no smaller after unscaling was multiplied by the scale: nobody means a bound in the thousands."""


@check(code="GS415", severity=Severity.ERROR, basis=Basis.MEASURED, explains_anywhere=("unchanged-weights",))
def clipped_before_unscale(probe: StepProbe | Missing, bound: ClipBound | Missing, run: RunRecord | Missing = NO_RUN) -> Answer:
    """Gradients are clipped while they still carry the loss scale: every step is cut down to bound / scale.

    ## What it finds
    Of a setup: in every watched step of the user's own `train_step` with a GradScaler, the L2 norm that the optimizer saw is
    max_grad_norm / scale (to 1e-3), while backward delivered more than the bound. Of a run: 5 steps in a row in which the norm after
    clipping is the bound / the loss scale (to 1 %) and the gradient, free of the scale, was at least 1.5 times that.

    ## Why it matters
    The bound is meant for unscaled gradients. With a scale of 65536 every step is that many times too small: SGD stands still, Adam
    drowns in its epsilon, and the gradient's length never says anything again.

    ## When it is not a problem
    `scaler.unscale_(optimizer)` before clipping: then the norm is at most the bound. Steps that no clipping touched. A bound that is
    multiplied by the scale: of a run it is known by a bound that moves with the scale, or that is at least 1 after unscaling; one
    between 0.01 and 1 under a scale that never changes is unknown.

    ## How to confirm by hand
    Print the gradient norm right before `optimizer.step`.

    ## How to fix
    `scaler.unscale_(optimizer)` between `backward()` and `clip_grad_norm_`.

    ## Options
    None.

    ## References
    Documentation of torch.amp, "gradient clipping".
    """
    if isinstance(probe, Missing) or isinstance(bound, Missing):
        about_setup = probe if isinstance(probe, Missing) else bound
        assert isinstance(about_setup, Missing)
        return of_either(about_setup, run if isinstance(run, Missing) else lambda: _of_run(run))
    return of_either(lambda: _of_setup(probe, bound), run if isinstance(run, Missing) else lambda: _of_run(run))


def _of_setup(probe: StepProbe, bound: ClipBound) -> Answer:
    if probe.scales is None:
        return NotApplicable(reason="the setup has no scaler")
    if not probe.is_users:
        return NotApplicable(reason="the setup has no train_step of its own: the order of unscaling and clipping is ours")
    if not probe.steps:
        return Unknown(reason="the scaler skipped every step (skipped-by-scaler judges that)")
    before, scale = probe.scales
    power = Power(quantity="length of a step cut by the scale", smallest_detectable=LEAST_CUT)
    if before != scale or scale < LEAST_CUT or not bound.max_grad_norm > 0:
        reason = f"the scale went from {before:g} to {scale:g}, max_grad_norm is {bound.max_grad_norm:g}"
        return NotApplicable(reason=f"{reason}: nothing to tell apart") if before == scale else Unknown(reason=reason)
    cut = [
        abs(s.gradient_norm * scale / bound.max_grad_norm - 1) <= TOLERANCE
        and s.backward_norm > LEAST_CUT * bound.max_grad_norm
        for s in probe.steps
    ]
    norms = ", ".join(f"{s.gradient_norm:.3g}" for s in probe.steps)
    if not all(cut):
        return answer((), power=power, reason=f"the optimizer saw norms of {norms} under a scale of {scale:g}")
    last = probe.steps[-1]
    return answer(
        [
            Finding(
                message=f"gradients are clipped before they are unscaled: in all {counted(len(cut), 'step')} the optimizer saw a norm "
                f"of max_grad_norm / scale = {bound.max_grad_norm:g} / {scale:g} = {last.gradient_norm:.3g}, while the gradient had "
                f"{last.backward_norm / scale:.3g}. Call scaler.unscale_(optimizer) before clip_grad_norm_.",
                where=Where(),
                measured=Quantity(value=last.gradient_norm, unit="L2 norm at the step"),
                expected=Quantity(value=min(bound.max_grad_norm, last.backward_norm / scale), unit="L2 norm at the step"),
                remedy="scaler.unscale_(optimizer); clip_grad_norm_(...)",
            )
        ]
    )


def _of_run(run: RunRecord) -> Answer:
    steps = [s for r in run.ranks for s in r.steps]
    if steps and not any((s.scale or 1.0) >= LEAST_CUT for s in steps):
        return NotApplicable(reason="no step had a loss scale above 1")
    if steps and not any(_has_bound(s) for s in steps):
        return NotApplicable(reason="no step was clipped to a bound by torch's clip_grad_norm_")
    refused = refusal(run, "norm", "norm_after", at_least=CUT_STEPS)
    if refused:
        return Unknown(reason=refused)
    undecided = ""
    for record, stretch in all_stretches(run):
        for start, stop in long_runs(stretch, [_was_cut(s) for s in stretch.steps], CUT_STEPS):
            cut = stretch.steps[start:stop]
            meant = _is_bound_scaled(cut[:HISTORY])  # no more than a live watch has before it
            if meant is False:
                return answer([_cut(cut, record.facts.rank)])
            if meant is None:
                undecided = (
                    f"from step {cut[0].number} on gradients were clipped to {cut[0].clip_bound:g} under a loss scale of "
                    f"{cut[0].scale:g}: whether that bound is meant for scaled gradients shows when the scale changes"
                )
    if undecided:
        return Unknown(reason=undecided)
    power = Power(quantity="steps in a row cut by the scale", smallest_detectable=CUT_STEPS, unit="steps")
    return answer((), power=power, reason=looked_at(run))


def _has_bound(step: Step) -> bool:
    return step.clip_bound is not None and 0 < step.clip_bound < math.inf and not step.clip_action


def _was_cut(step: Step) -> bool:
    """What the optimizer was given has the length of bound / scale, and was longer before."""
    scale, norm, after, bound = step.scale, step.norm, step.norm_after, step.clip_bound
    if scale is None or norm is None or after is None or bound is None or not _has_bound(step):
        return False
    if step.outcome is not StepOutcome.STEPPED or not LEAST_CUT <= scale < math.inf or not norm < math.inf:
        return False
    return abs(after * scale / bound - 1) <= RUN_TOLERANCE and norm >= RUN_CUT * after


def _is_bound_scaled(cut: Sequence[Step]) -> bool | None:
    """True where the bound was multiplied by the scale, so that nothing is wrong; None if that cannot be told."""
    pairs = [(s.clip_bound, s.scale) for s in cut if s.clip_bound is not None and s.scale is not None]
    if len({scale for _, scale in pairs}) > 1 and len({bound for bound, _ in pairs}) == 1:
        return False  # the bound stays where it is while the scale moves
    left = [bound / scale for bound, scale in pairs]
    moves = len({bound for bound, _ in pairs}) > 1 and max(left) <= (1 + RUN_TOLERANCE) * min(left)
    if moves or min(left) >= FULL_BOUND:
        return True
    return False if max(left) < MEANT_BOUND else None


def _cut(steps: Sequence[Step], rank: int) -> Finding:
    first = steps[0]
    norm, after = first.norm or 0.0, first.norm_after or 0.0
    return Finding(
        message=f"gradients are clipped before they are unscaled: in {counted(len(steps), 'step')} in a row, from step {first.number} "
        f"on, the optimizer was given a norm of bound / loss scale = {first.clip_bound:g} / {first.scale:g} = {after:.3g}, while the "
        f"gradient had {norm:.3g}: steps that are {norm / after:.3g} times too short for SGD, and near Adam's epsilon. Call "
        "scaler.unscale_(optimizer) before clip_grad_norm_.",
        where=Where(step=first.number, rank=rank),
        measured=Quantity(value=after, unit="L2 norm at the step"),
        expected=Quantity(value=min(first.clip_bound or norm, norm), unit="L2 norm at the step"),
        remedy="scaler.unscale_(optimizer); clip_grad_norm_(...)",
    )
