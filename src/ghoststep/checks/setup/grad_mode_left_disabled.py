"""GS612."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.training import LiveWiring, StepProbe
from ghoststep.finding import Basis, Finding, Power, Severity, Where
from ghoststep.registry import Answer, answer, check


@check(code="GS612", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("trainable-without-gradient",))
def grad_mode_left_disabled(wiring: LiveWiring, probe: StepProbe | Missing) -> Answer:
    """Gradient mode is off where training happens, or the user's code leaves it off.

    ## What it finds
    `torch.is_grad_enabled()` when the setup is handed over, after the loss ran, and after train_step.

    ## Why it matters
    `torch.set_grad_enabled(False)` lasts until somebody turns it on: after an evaluation that forgets, forwards build no graph. Where
    part of the step turns it on again, the rest is silently not trained.

    ## When it is not a problem
    `with torch.no_grad():` around an evaluation ends by itself.

    ## How to confirm by hand
    `torch.is_grad_enabled()` at the start of the step.

    ## How to fix
    Use `with torch.no_grad():` (or the decorator) instead of `set_grad_enabled(False)`.

    ## Options
    None.

    ## References
    None.
    """
    places = [
        (wiring.grad_mode_before, "is off when the setup is handed over"),
        (wiring.grad_mode_after, "is off after the loss ran"),
    ]
    if not isinstance(probe, Missing):
        places.append((probe.grad_mode_after, "is off after train_step"))
    found = next((text for enabled, text in places if not enabled), None)
    findings = []
    if found is not None:
        findings.append(
            Finding(
                message=f"gradient mode {found} (torch.is_grad_enabled() is False): from there on no forward builds a "
                "graph, and what it feeds "
                "gets no gradient. Use `with torch.no_grad():` around evaluation instead of torch.set_grad_enabled(False).",
                where=Where(),
                remedy="with torch.no_grad() instead of set_grad_enabled(False)",
            )
        )
    return answer(findings, power=Power(quantity="places where gradient mode is off", smallest_detectable=1, unit="places"))
