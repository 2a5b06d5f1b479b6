"""GS608."""

from ghoststep.evidence.training import StepProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS608", severity=Severity.ERROR, basis=Basis.PROOF)
def scheduler_not_stepped(probe: StepProbe) -> Answer:
    """The learning-rate schedule never reaches the optimizer.

    ## What it finds
    A scheduler that was made for another optimizer than the one that steps (error), or one that train_step does not advance: a
    warning while the learning rate is 0 in every step, else a note, since the loop around train_step may advance it.

    ## Why it matters
    The learning rate stays where it starts: at 0 with a warm-up, at the peak without the decay.

    ## When it is not a problem
    A loop that calls `scheduler.step()` itself, or once an epoch.

    ## How to confirm by hand
    `optimizer.param_groups[0]["lr"]` after each step; `scheduler.optimizer is optimizer`.

    ## How to fix
    Make the scheduler from the optimizer that steps, and call `scheduler.step()` after each `optimizer.step()`.

    ## Options
    None.

    ## References
    None.
    """
    if probe.scheduler_steps is None:
        return NotApplicable(reason="the setup has no scheduler that counts its steps")
    power = Power(quantity="optimizer steps without a scheduler step", smallest_detectable=1, unit="steps")
    if not probe.scheduler_is_bound:
        finding = Finding(
            message="the scheduler belongs to another optimizer than the one of the setup: stepping it never changes "
            "the learning rate that is "
            "used. Make the scheduler from this optimizer, after the optimizer's last change.",
            where=Where(),
            remedy="make the scheduler from the optimizer that steps",
        )
        return answer([finding])
    if not probe.is_users:
        return NotApplicable(reason="the setup has no train_step that could advance the scheduler")
    if not probe.steps:
        return Unknown(reason=f"no optimizer step in {probe.num_calls} calls")
    if probe.scheduler_steps > 0:
        return answer(
            (), power=power, reason=f"advanced {probe.scheduler_steps} times in {counted(len(probe.steps), 'optimizer step')}"
        )
    stuck = all(lr == 0 for s in probe.steps for lr in s.lrs)
    finding = Finding(
        message=f"train_step took {counted(len(probe.steps), 'optimizer step')} and never advanced the scheduler"
        + ("; the learning rate is 0 in all of them" if stuck else f" (learning rate {probe.steps[-1].lrs[0]:.3g} throughout)")
        + ". Unless the loop around it does, call scheduler.step() after each optimizer.step().",
        where=Where(),
        measured=Quantity(value=0, unit="scheduler steps"),
        expected=Quantity(value=len(probe.steps), unit="scheduler steps"),
        severity=Severity.WARNING if stuck else Severity.NOTE,
        basis=Basis.MEASURED,
        remedy="scheduler.step() after optimizer.step()",
    )
    return answer([finding])
