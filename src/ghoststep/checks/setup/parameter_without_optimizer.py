"""GS601."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.training import Gradient, LiveWiring, Orphan, ParameterFacts, StepProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted, listed, shape_text
from ghoststep.registry import Answer, Unknown, answer, check


@check(code="GS601", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("orphan-in-optimizer", "unchanged-weights"))
def parameter_without_optimizer(wiring: LiveWiring, probe: StepProbe | Missing) -> Answer:
    """Trainable parameters are in no group of the optimizer, so that they never change.

    ## What it finds
    Parameters of the model with `requires_grad`, compared by identity with the tensors in the optimizer. Those that the loss does
    not reach are left out, and so are those that the user's own train_step changes all the same (another optimizer holds them).
    An error where few are missing or the optimizer holds orphans; a warning where most are (a part is trained on purpose, and the
    others were not frozen).

    ## Why it matters
    Their gradients are computed, counted in the gradient norm and thrown away. Typical: the optimizer was made before the table
    was resized, before an adapter was added, or before the model was rebuilt; or a group was forgotten.

    ## When it is not a problem
    Frozen parameters. A second optimizer that the setup does not show and train_step does not step: give a list of both.

    ## How to confirm by hand
    `held = {id(p) for g in optimizer.param_groups for p in g["params"]}`, then the names of parameters that are not in it.

    ## How to fix
    Make the optimizer after the last change of the model; freeze on purpose with `requires_grad_(False)`.

    ## Options
    None.

    ## References
    None.
    """
    if not wiring.has_optimizer:
        return Unknown(reason="the setup has no optimizer")
    if wiring.holds_copies:
        return Unknown(reason="the optimizer holds copies of the parameters (master weights): which is which cannot be told")
    elsewhere = frozenset() if isinstance(probe, Missing) else frozenset(probe.changed_outside)
    unused = frozenset(wiring.unused)
    trainable = [p for p in wiring.parameters if p.trainable]
    missing = [p for p in trainable if p.group is None and p.name not in elsewhere | unused and p.gradient is not Gradient.NONE]
    orphans = [o for o in wiring.orphans if not o.gets_gradient]
    power = Power(quantity="trainable parameters outside the optimizer", smallest_detectable=1, unit="parameters")
    if not missing:
        return answer((), power=power, reason=f"{counted(len(trainable), 'trainable parameter')}, all in the optimizer")
    return answer([_finding(missing, len(trainable), orphans)])


def _finding(missing: list[ParameterFacts], num_trainable: int, orphans: list[Orphan]) -> Finding:
    names = [p.name for p in missing]
    held = num_trainable - len(missing)
    few = bool(orphans) or len(missing) <= held
    facts = f"{listed(names)} {'is' if len(names) == 1 else 'are'} trainable"
    largest = max(missing, key=lambda p: p.gradient_norm)
    if largest.gradient is Gradient.NORMAL:
        facts += (
            f" and gets a gradient (norm {largest.gradient_norm:.3g}" if len(names) == 1 else " and get gradients (norm up to "
        )
        facts += ")" if len(names) == 1 else f"{largest.gradient_norm:.3g})"
    message = f"{facts}, but {'is' if len(names) == 1 else 'are'} not in the optimizer, which holds {held} of "
    message += f"{num_trainable} trainable "
    message += "parameters: no step ever changes "
    message += f"{'it' if len(names) == 1 else 'them'}."
    former = _former(missing, orphans)
    if former is not None:
        message += (
            f" It holds an orphan of shape {shape_text(former[1].shape)} (group {former[1].group}) instead of {former[0].name} "
            f"{shape_text(former[0].shape)}: it was made before the model changed."
        )
    message += (
        " Make the optimizer after the last change of the model."
        if few
        else " If only a part is meant to train, freeze the rest (requires_grad_(False)): gradients cost memory and count in clipping."
    )
    return Finding(
        message=message,
        where=Where(parameter=(former[0] if former else largest).name),
        measured=Quantity(value=len(missing), unit="trainable parameters outside the optimizer"),
        expected=Quantity(value=0, unit="trainable parameters outside the optimizer"),
        severity=Severity.ERROR if few else Severity.WARNING,
        remedy="make the optimizer from the final model's parameters",
    )


def _former(missing: list[ParameterFacts], orphans: list[Orphan]) -> tuple[ParameterFacts, Orphan] | None:
    """A missing parameter and the orphan that it once was: same trailing dimensions."""
    for p in missing:
        for orphan in orphans:
            if len(p.shape) == len(orphan.shape) and p.shape[1:] == orphan.shape[1:]:
                return p, orphan
    return None
