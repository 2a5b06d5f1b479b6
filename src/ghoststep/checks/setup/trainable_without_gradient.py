"""GS603."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.training import CutParameters, Gradient, LiveWiring
from ghoststep.evidence.zero_gradients import ZeroGradients
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted, listed
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check

_NOT_ASKED = Missing(reason="not asked")


@check(code="GS603", severity=Severity.ERROR, basis=Basis.PROOF)
def trainable_without_gradient(wiring: LiveWiring, zeros: ZeroGradients | Missing = _NOT_ASKED) -> Answer:
    """Trainable parameters get no gradient although the loss depends on them: the graph is cut, or all of them stand on a saddle.

    ## What it finds
    Parameters with `requires_grad` whose `.grad` is None after a backward of the loss on the first batch, and whose perturbation
    moves the loss. The message gives the cause where it was seen: reentrant activation checkpointing, `no_grad`, or a detached
    result. Or: the gradient of every trainable parameter is exactly zero, and so is that of a random combination of the model's
    outputs, so that no loss could move anything.

    ## Why it matters
    They never train, and no error is raised as long as anything else gets a gradient. Typical: adapters inside reentrant
    checkpointed blocks behind a frozen embedding.

    ## When it is not a problem
    Parameters that the loss does not depend on in this batch: experts without tokens, a pooler nobody reads, an unused branch
    (they are counted in the reason). Parameters that act through a discrete choice only (the indexer of a sparse attention). A
    gradient of exactly zero, such as that of `lora_A` while `lora_B` is zero; all of them zero where the rewards of a group are equal
    (a random combination of the outputs reaches the parameters then). Parameters that the given optimizer does not hold
    (the target network of BYOL or MoCo).

    ## How to confirm by hand
    `loss.backward()`, then the names of parameters with `p.requires_grad and p.grad is None`.

    ## How to fix
    Reentrant checkpointing: `use_reentrant=False` (`gradient_checkpointing_kwargs`), or `model.enable_input_require_grads()`.
    Otherwise take away the `no_grad` or `detach` that the message names. Two factors that are both zero (`lora_A` and `lora_B`): give
    one of them random values.

    ## Options
    None.

    ## References
    Documentation of torch.utils.checkpoint: the reentrant kind needs an input that requires a gradient.
    """
    trainable = [p for p in wiring.parameters if p.trainable]
    if not trainable:
        return NotApplicable(reason="no parameter is trainable (frozen-by-accident judges that)")
    if not wiring.grad_mode_before:
        return Unknown(reason=wiring.gradient_reason)
    if wiring.gradient_reason.startswith("the loss does not require"):
        return answer([_all_cut([p.name for p in trainable])])
    if wiring.gradient_reason:
        return Unknown(reason=wiring.gradient_reason)
    if isinstance(zeros, ZeroGradients) and not zeros.reached:
        return answer([_saddle(zeros)])
    claimed = [cut for cut in wiring.cut if _is_claimed(cut, wiring)]
    findings = [_finding(cut, len(trainable)) for cut in claimed]
    notes = [
        f"{listed(cut.names)} get none and are in no optimizer: nothing trains them on purpose (a target network)"
        for cut in wiring.cut
        if cut not in claimed
    ]
    if wiring.unused:
        notes.append(
            f"the loss of the first batch does not depend on {counted(len(wiring.unused), 'trainable parameter')} "
            f"({listed(wiring.unused)}), or only through a discrete choice"
        )
    undecided = None
    if wiring.undecided:
        undecided = f"{counted(len(wiring.undecided), 'trainable parameter')} without gradient ({listed(wiring.undecided)}): "
        undecided += "whether the loss depends on them smoothly, or through a discrete choice only, could not be told"
    reached = sum(1 for p in trainable if p.gradient not in (None, Gradient.NONE))
    notes.insert(0, f"{reached} of {len(trainable)} trainable parameters got a gradient")
    power = Power(quantity="trainable parameters without gradient", smallest_detectable=1, unit="parameters")
    return answer(findings, power=power, reason="; ".join(notes), undecided=undecided)


def _is_claimed(cut: CutParameters, wiring: LiveWiring) -> bool:
    """False where an optimizer was given and holds none of them: they are not meant to train."""
    if not wiring.has_optimizer or wiring.holds_copies:
        return True
    return any(p.group is not None for p in wiring.parameters if p.name in cut.names)


def _finding(cut: CutParameters, num_trainable: int) -> Finding:
    fix = "Take the no_grad or detach away, or freeze the parameters on purpose."
    if cut.reason.startswith("reentrant"):
        fix = "Pass use_reentrant=False to checkpointing, or call model.enable_input_require_grads()."
    return Finding(
        message=f"{len(cut.names)} of {num_trainable} trainable parameters ({listed(cut.names)}) get no gradient "
        "(None) although "
        f"backward succeeds and the loss depends on them (it moves by {cut.loss_change:.2g} when they are perturbed): "
        f"{cut.reason}. {fix}",
        where=Where(parameter=cut.names[0]),
        measured=Quantity(value=len(cut.names), unit="trainable parameters without gradient"),
        expected=Quantity(value=0, unit="trainable parameters without gradient"),
        remedy=fix,
    )


def _all_cut(names: list[str]) -> Finding:
    return Finding(
        message=f"the loss on the first batch requires no gradient although {counted(len(names), 'parameter')} are trainable "
        f"({listed(names)}): every path from them to the loss is cut (no_grad, detach, or reentrant activation checkpointing behind "
        "a frozen embedding). Take the cut away, or pass use_reentrant=False.",
        where=Where(parameter=names[0]),
        measured=Quantity(value=len(names), unit="trainable parameters without gradient"),
        expected=Quantity(value=0, unit="trainable parameters without gradient"),
    )


def _saddle(zeros: ZeroGradients) -> Finding:
    values = (
        f" {len(zeros.zero_valued)} of them hold nothing but zeros ({listed(list(zeros.zero_valued))}): where two of these are "
        "multiplied (both factors of an adapter), neither can leave zero. Give one factor random values."
        if zeros.zero_valued
        else " Look for what multiplies them by zero."
    )
    return Finding(
        message=f"the gradient of all {zeros.num_parameters} trainable parameters is exactly zero, and not only that of this loss: a "
        f"random combination of the model's outputs reaches none of them either, so no loss can move anything.{values}",
        where=Where(parameter=zeros.zero_valued[0] if zeros.zero_valued else None),
        measured=Quantity(value=0, unit="trainable parameters reached"),
        expected=Quantity(value=zeros.num_parameters, unit="trainable parameters reached"),
        remedy="initialise one factor of each product with random values",
    )
