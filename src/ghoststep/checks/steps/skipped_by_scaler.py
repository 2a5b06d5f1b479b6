"""GS407."""

import math

from ghoststep.evidence.training import Gradient, LiveWiring, StepProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, NotApplicable, answer, check


@check(code="GS407", severity=Severity.ERROR, basis=Basis.MEASURED)
def skipped_by_scaler(wiring: LiveWiring, probe: StepProbe, *, most_skips: int = 200) -> Answer:
    """The loss scaler skips steps without end.

    ## What it finds
    Every step of the probe was skipped, and no lower scale will help: the gradients are not finite without a scale, or the
    scale did not go down after a skip (`scaler.update()` is not called).

    ## Why it matters
    A skipped step raises nothing and fires no hook; the loop runs on, the scheduler advances, the weights stay.

    ## When it is not a problem
    A few skips at the start: the scaler begins at a scale that is too large and halves it until the gradients fit.

    ## How to confirm by hand
    `scaler.get_scale()` after each step.

    ## How to fix
    Call `scaler.update()` once after each `scaler.step(optimizer)`; find the non-finite gradient; use bf16.

    ## Options
    `most_skips`: how many further skips are taken for an ordinary start; 200 by default. Halving needs at most 128 from the largest
    float32 down to 1, so that only a backoff_factor near 1 comes this far.

    ## References
    Documentation of torch.amp.GradScaler.
    """
    if probe.scales is None:
        return NotApplicable(reason="the setup has no scaler")
    before, after = probe.scales
    power = Power(quantity="skipped steps", smallest_detectable=1, unit="steps")
    if probe.num_skipped == 0 or probe.steps:
        return answer(
            (), power=power, reason=f"{counted(probe.num_skipped, 'early skip')}, then {counted(len(probe.steps), 'step')}"
        )
    unscaled_bad = any(p.gradient is Gradient.NONFINITE for p in wiring.parameters)
    if not unscaled_bad and after < before:
        norm = math.hypot(*(p.gradient_norm for p in wiring.parameters)) or 1.0
        factor = (after / before) ** (1 / probe.num_skipped)  # what one skip takes off, as the scaler itself did it
        more = max(0, math.ceil(math.log(max(1.0, after * norm / 65504)) / -math.log(factor)))
        fell = f"all {probe.num_skipped} steps were skipped while the scale fell from {before:g} to {after:g}"
        if more <= most_skips:
            reason = (
                f"{fell}; without a scale the gradients are finite (norm {norm:.3g}): about {more} more skips make them fit"
            )
            return answer((), power=power, reason=reason)
        return answer([
            Finding(
                message=f"{fell}: at this pace about {more} more steps are skipped before the gradients (norm {norm:.3g} without a "
                "scale) fit into fp16. Start from a smaller init_scale, or use a backoff_factor near 0.5.",
                where=Where(),
                measured=Quantity(value=more, unit="more skipped steps"),
                expected=Quantity(value=most_skips, unit="more skipped steps, at most"),
            )
        ])  # fmt: skip
    cause = (
        "the gradients are not finite even without a scale, so that no scale helps. Find their source (nonfinite-gradient)"
        if unscaled_bad
        else f"the scale stayed at {after:g}: scaler.update() is not called after scaler.step(). Call it once a step"
    )
    finding = Finding(
        message=f"the scaler skipped all {probe.num_skipped} steps, and {cause}.",
        where=Where(),
        measured=Quantity(value=probe.num_skipped, unit="skipped steps"),
        expected=Quantity(value=0, unit="skipped steps"),
    )
    return answer([finding])
