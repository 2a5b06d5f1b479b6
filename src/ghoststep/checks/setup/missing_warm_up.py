"""GS607."""

from ghoststep.evidence.training import ScheduleFacts
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check


@check(code="GS607", severity=Severity.NOTE, basis=Basis.RULE_OF_THUMB)
def missing_warm_up(schedule: ScheduleFacts, *, small_lr: float = 1e-4) -> Answer:
    """An adaptive optimizer starts at the full learning rate.

    ## What it finds
    A scheduler whose first learning rate is already its largest of the next steps, above `small_lr`, for an optimizer with second
    moments and no state yet.

    ## Why it matters
    The first updates of Adam have full size whatever the gradient (their second moments rest on one batch): large models can be
    thrown far off and need long to come back.

    ## When it is not a problem
    Small learning rates, fine-tuning of few parameters, resumed runs, optimizers without second moments.

    ## How to confirm by hand
    Print the learning rate of the first ten steps.

    ## How to fix
    Raise the learning rate over the first 1 to 3 % of the steps.

    ## Options
    `small_lr`: largest learning rate that may start at once (1e-4).

    ## References
    Common practice; a rule of thumb.
    """
    if not schedule.is_adaptive:
        return NotApplicable(reason="the optimizer keeps no second moments")
    if schedule.has_state:
        return NotApplicable(reason="the optimizer has stepped before: this is no start")
    first, largest = schedule.lrs_ahead[0], max(schedule.lrs_ahead)
    findings = []
    if first >= largest and first > small_lr:
        findings.append(
            Finding(
                message=f"the schedule starts at its largest learning rate ({first:.3g}) with an optimizer of the "
                "Adam family that has no state "
                "yet: its first updates have full size on the evidence of one batch. Warm up over the first 1 to 3 % "
                "of the steps.",
                where=Where(),
                measured=Quantity(value=first, unit="learning rate at step 0"),
                expected=Quantity(value=small_lr, unit="learning rate, at most"),
            )
        )
    return answer(findings, power=Power(quantity="learning rate at step 0", smallest_detectable=small_lr, unit="1"))
