"""GS609."""

from ghoststep.evidence.training import StepProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS609", severity=Severity.ERROR, basis=Basis.MEASURED)
def scheduler_stepped_per_micro_batch(probe: StepProbe) -> Answer:
    """The scheduler advances at every micro-batch instead of every optimizer step.

    ## What it finds
    train_step calls that take no optimizer step (they accumulate) but advance the scheduler all the same.

    ## Why it matters
    Warm-up and decay run several times too fast: the learning rate is at its end when training is far from it.

    ## When it is not a problem
    A schedule whose length was given in micro-batches; steps that a loss scaler skipped.

    ## How to confirm by hand
    `scheduler.last_epoch` against the number of optimizer steps.

    ## How to fix
    Call `scheduler.step()` only where `optimizer.step()` is called.

    ## Options
    None.

    ## References
    None.
    """
    if probe.scheduler_steps is None:
        return NotApplicable(reason="the setup has no scheduler that counts its steps")
    if not probe.is_users:
        return NotApplicable(reason="the setup has no train_step that could advance the scheduler")
    num_steps = len(probe.steps)
    if num_steps == 0:
        return Unknown(reason=f"no optimizer step in {probe.num_calls} calls")
    power = Power(quantity="scheduler steps beyond optimizer steps", smallest_detectable=1, unit="steps")
    # One call may hold the whole window: then the advances must be those of its declared micro-batches. Other multiples are left
    # alone (a scheduler prepared for several processes advances once for each).
    window = probe.accumulation_steps > 1 and probe.scheduler_steps == probe.accumulation_steps * num_steps
    if probe.num_skipped or probe.scheduler_steps <= num_steps or (probe.num_calls <= num_steps and not window):
        return answer((), power=power, reason=f"{probe.scheduler_steps} scheduler steps for {num_steps} optimizer steps")
    factor = probe.scheduler_steps / num_steps
    finding = Finding(
        message=f"the scheduler advanced {probe.scheduler_steps} times in {num_steps} optimizer steps "
        f"({max(probe.num_calls, probe.accumulation_steps * num_steps)} micro-batches): warm-up and "
        f"decay run {factor:.3g} times too fast, and the schedule ends after 1/{factor:.3g} of the run. Call "
        "scheduler.step() only where "
        "optimizer.step() is called.",
        where=Where(),
        measured=Quantity(value=factor, unit="scheduler steps an optimizer step"),
        expected=Quantity(value=1, unit="scheduler steps an optimizer step"),
        remedy="scheduler.step() only after optimizer.step()",
    )
    return answer([finding])
