"""GS415."""

from ghoststep.evidence.training import ClipBound, StepProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check

TOLERANCE = 1e-3
"""Of the clipped norm: `clip_grad_norm_` adds 1e-6 to it, and fp16 gradients round it by up to 5e-4."""
LEAST_CUT = 2.0
"""How far the clipping must have cut the gradient for its trace to be sure."""


@check(code="GS415", severity=Severity.ERROR, basis=Basis.MEASURED)
def clipped_before_unscale(probe: StepProbe, bound: ClipBound) -> Answer:
    """Gradients are clipped while they still carry the loss scale: every step is cut down to bound / scale.

    ## What it finds
    In every watched step of the user's own `train_step` with a GradScaler, the L2 norm that the optimizer saw is max_grad_norm /
    scale (to 1e-3), while backward delivered more than the bound.

    ## Why it matters
    The bound is meant for unscaled gradients. With a scale of 65536 every step is that many times too small: SGD stands still, Adam
    drowns in its epsilon, and the gradient's length never says anything again.

    ## When it is not a problem
    `scaler.unscale_(optimizer)` before clipping: then the norm is at most the bound. Steps that no clipping touched.

    ## How to confirm by hand
    Print the gradient norm right before `optimizer.step`.

    ## How to fix
    `scaler.unscale_(optimizer)` between `backward()` and `clip_grad_norm_`.

    ## Options
    None.

    ## References
    Documentation of torch.amp, "gradient clipping".
    """
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
