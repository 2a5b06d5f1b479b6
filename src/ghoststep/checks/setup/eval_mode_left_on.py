"""GS616."""

from ghoststep.evidence.model_state import ModelState
from ghoststep.finding import Basis, Finding, Quantity, Severity, Where
from ghoststep.parameter_text import counted, listed
from ghoststep.registry import Answer, Clear, NotApplicable, Unknown, answer, check


@check(code="GS616", severity=Severity.NOTE, basis=Basis.PROOF)
def eval_mode_left_on(state: ModelState) -> Answer:
    """The model that is about to be trained is in evaluation mode, and its dropout does nothing.

    ## What it finds
    `model.training` is False as handed over and while the loss calls it, an optimizer is given, and modules with a dropout above 0
    are in evaluation mode.

    ## Why it matters
    After `model.eval()` (an evaluation at the start, `from_pretrained`, which returns models in evaluation mode) nothing turns
    training mode on by itself. The run then trains without the dropout its config states, and normalisation layers keep their
    stored statistics: no error, other results.

    ## When it is not a problem
    The model was put into evaluation mode for this check only, or training without dropout is meant. Trainers that call
    `model.train()` themselves. A tower in evaluation mode inside a model in training mode is silent: that is done on purpose.

    ## How to confirm by hand
    `model.training` where the loss is computed.

    ## How to fix
    `model.train()` before the training loop and after each evaluation; hand the model over in the mode it will train in.

    ## Options
    None.

    ## References
    None.
    """
    if not state.has_optimizer:
        return NotApplicable(reason="the setup has no optimizer: nothing says that this model is about to be trained")
    if state.training or state.trains_in_loss:
        return Clear(reason="training mode" if state.training else "the loss turns training mode on")
    if not state.dropouts:
        return Clear(reason="evaluation mode, but no module has a dropout above 0")
    if state.has_train_step:
        return Unknown(
            reason="the model is handed over in evaluation mode; whether train_step turns training mode on was not seen"
        )
    names = list(state.dropouts)
    return answer(
        [
            Finding(
                message="the model is in evaluation mode (model.training is False) and an optimizer is given: "
                f"{counted(len(names), 'module')} with dropout ({listed(names)}) would train without it. Call model.train() "
                "before training; if the mode was set for this check only, hand the model over as it will be trained.",
                where=Where(module=names[0]),
                measured=Quantity(value=len(names), unit="modules whose dropout is off"),
                remedy="model.train()",
            )
        ]
    )
