"""GS412."""

from ghoststep.evidence.training import StepProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted, listed
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS412", severity=Severity.ERROR, basis=Basis.PROOF)
def gradients_not_cleared(probe: StepProbe, *, leftover_fraction: float = 1e-3) -> Answer:
    """Gradients of earlier steps are never cleared, so that each step adds to all before it.

    ## What it finds
    What `.grad` already holds when the first backward after an optimizer step reaches a parameter, against its gradient.

    ## Why it matters
    The effective gradient is the sum over the whole history: it grows, points into the past, and clipping hides its size.

    ## When it is not a problem
    Accumulation between two steps of the same optimizer; a second optimizer that steps more rarely.

    ## How to confirm by hand
    Print the norm of one `.grad` just before `backward()`.

    ## How to fix
    `optimizer.zero_grad()` once for each step, of the optimizer (or model) that holds all trained parameters.

    ## Options
    `leftover_fraction`: leftover over gradient norm from which it counts (1e-3).

    ## References
    None.
    """
    if not probe.is_users:
        return NotApplicable(reason="the setup has no train_step whose clearing could be watched")
    if len(probe.steps) < 2:
        return Unknown(reason=f"{counted(len(probe.steps), 'optimizer step')} in {probe.num_calls} calls; two are needed")
    left = [p for p in probe.parameters if p.leftover > leftover_fraction * p.largest_gradient > 0]
    findings = []
    if left:
        worst = max(left, key=lambda p: p.leftover)
        findings.append(
            Finding(
                message=f"{len(left)} of {counted(len(probe.parameters), 'parameter')} in the optimizer "
                f"({listed([p.name for p in left])}) still hold "
                f"the gradient of an earlier step when the next backward begins (norm {worst.leftover:.3g} left in "
                f"{worst.name}, where a step "
                f"saw up to {worst.largest_gradient:.3g}): steps add up over the whole run. Call "
                "optimizer.zero_grad() once for each step.",
                where=Where(parameter=worst.name),
                measured=Quantity(value=worst.leftover, unit="L2 norm left over"),
                expected=Quantity(value=0.0, unit="L2 norm left over"),
                remedy="optimizer.zero_grad() before backward or after step",
            )
        )
    power = Power(quantity="leftover over gradient", smallest_detectable=leftover_fraction, unit="fraction")
    return answer(findings, power=power, reason=f"{counted(len(probe.steps), 'step')} watched")
