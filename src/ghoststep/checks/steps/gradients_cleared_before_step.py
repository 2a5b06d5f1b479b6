"""GS413."""

from ghoststep.evidence.training import StepProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS413", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("unchanged-weights",))
def gradients_cleared_before_step(probe: StepProbe) -> Answer:
    """Gradients are gone by the time the optimizer steps.

    ## What it finds
    Steps at which every gradient is None or exactly zero although backward had delivered non-zero ones since the step before.

    ## Why it matters
    The step only applies decay and old momentum; nothing is learned from the batch.

    ## When it is not a problem
    Gradients that are zero from the start (equal rewards); steps that a loss scaler skips.

    ## How to confirm by hand
    The norm of one `.grad` right before `optimizer.step()`.

    ## How to fix
    The order is zero_grad, backward, clip, step. A clipping bound of 0 has the same effect.

    ## Options
    None.

    ## References
    None.
    """
    if not probe.is_users:
        return NotApplicable(reason="the setup has no train_step whose order could be watched")
    if not probe.steps:
        return Unknown(reason=f"no optimizer step in {probe.num_calls} calls")
    lost = [i for i, s in enumerate(probe.steps) if s.gradient_norm == 0.0 and s.backward_norm > 0.0]
    findings = []
    if lost:
        step = probe.steps[lost[0]]
        findings.append(
            Finding(
                message=f"in {len(lost)} of {counted(len(probe.steps), 'step')} all gradients were zero or None when "
                "the optimizer stepped, although "
                f"backward had delivered a norm of {step.backward_norm:.3g}: something clears them in between. Call "
                "zero_grad() before "
                "backward() or after step(), and clip with a bound above 0.",
                where=Where(step=lost[0]),
                measured=Quantity(value=0.0, unit="gradient norm at the step"),
                expected=Quantity(value=step.backward_norm, unit="gradient norm from backward"),
                remedy="order: zero_grad, backward, clip, step",
            )
        )
    power = Power(quantity="steps without the gradients that backward delivered", smallest_detectable=1, unit="steps")
    return answer(findings, power=power, reason=f"{counted(len(probe.steps), 'step')} watched")
