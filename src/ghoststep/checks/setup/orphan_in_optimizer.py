"""GS602."""

from collections.abc import Sequence

from ghoststep.evidence.training import LiveWiring, Orphan
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted, shape_text
from ghoststep.registry import Answer, Unknown, answer, check


@check(code="GS602", severity=Severity.ERROR, basis=Basis.PROOF)
def orphan_in_optimizer(wiring: LiveWiring) -> Answer:
    """The optimizer holds tensors that the model does not use any more.

    ## What it finds
    Tensors of the optimizer that are no parameter of the model and got no gradient from the loss. An error where nothing in the
    optimizer belongs to the model, else a warning.

    ## Why it matters
    Steps on an orphan change nothing. Usually the tensor that replaced it is not trained (see parameter-without-optimizer).

    ## When it is not a problem
    Parameters of the loss itself (they get gradients), master weights in another precision, another network that this loss does
    not touch and that is trained by another one.

    ## How to confirm by hand
    `mine = {id(p) for p in model.parameters()}`, then the shapes in `optimizer.param_groups` whose id is not in it.

    ## How to fix
    Make the optimizer again, or replace the tensor in its group, after the model was resized, wrapped or moved.

    ## Options
    None.

    ## References
    None.
    """
    if not wiring.has_optimizer:
        return Unknown(reason="the setup has no optimizer")
    if wiring.holds_copies:
        return Unknown(reason="the optimizer holds copies of the parameters (master weights): which is which cannot be told")
    if wiring.orphans and wiring.gradient_reason:
        return Unknown(
            reason=f"{counted(len(wiring.orphans), 'tensor')} of the optimizer are not the model's; whether the loss "
            "reaches them is "
            f"open: {wiring.gradient_reason}"
        )
    orphans = [o for o in wiring.orphans if not o.gets_gradient]
    findings = [_finding(orphans, sum(g.num_tensors for g in wiring.groups))] if orphans else []
    power = Power(quantity="orphan tensors in the optimizer", smallest_detectable=1, unit="tensors")
    loss_own = len(wiring.orphans) - len(orphans)
    reason = f"{counted(loss_own, 'tensor')} outside the model get gradients: parameters of the loss" if loss_own else None
    return answer(findings, power=power, reason=reason)


def _finding(orphans: Sequence[Orphan], num_tensors: int) -> Finding:
    shapes = ", ".join(f"{shape_text(o.shape)} in group {o.group}" for o in orphans[:4])
    more = f" and {len(orphans) - 4} more" if len(orphans) > 4 else ""
    all_of_them = len(orphans) == num_tensors
    effect = "the optimizer trains nothing of this model" if all_of_them else "stepping them changes nothing"
    return Finding(
        message=f"{len(orphans)} of {num_tensors} tensors in the optimizer ({shapes}{more}) are no parameters of the model and "
        f"get no gradient from the loss: {effect}. Make the optimizer after the model was resized, wrapped or moved.",
        where=Where(),
        measured=Quantity(value=len(orphans), unit="orphan tensors"),
        expected=Quantity(value=0, unit="orphan tensors"),
        severity=Severity.ERROR if all_of_them else Severity.WARNING,
        remedy="make the optimizer from the final model's parameters",
    )
