"""GS611."""

from ghoststep.evidence.training import SavedState
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted, listed
from ghoststep.registry import Answer, answer, check


@check(code="GS611", severity=Severity.ERROR, basis=Basis.PROOF)
def trained_not_saved(saved: SavedState) -> Answer:
    """What is trained does not come back after saving and loading.

    ## What it finds
    Every trainable parameter is moved a little, the setup's own `save` and `load` are run in a temporary folder, and the values
    that come back are compared by name. The parameters are put back bit for bit.

    ## Why it matters
    The run looks perfect until it is loaded: a resized table, a head or norms outside the adapter, a tied head that was not tied.

    ## When it is not a problem
    Rounding by a narrower storage type.

    ## How to confirm by hand
    The loss before saving and after loading, on one batch.

    ## How to fix
    Save the whole state dict, or name the further modules to the saver (PEFT: `modules_to_save`, `save_embedding_layers`).

    ## Options
    None.

    ## References
    None.
    """
    bad = [*saved.missing, *(name for name, _ in saved.different)]
    findings = []
    if bad:
        what = []
        if saved.missing:
            what.append(
                f"{counted(len(saved.missing), 'trainable parameter')} ({listed(saved.missing)}) are not in the loaded model"
            )
        if saved.different:
            name, share = max(saved.different, key=lambda d: d[1])
            names = listed([n for n, _ in saved.different])
            what.append(
                f"{counted(len(saved.different), 'trainable parameter')} ({names}) come back with other values "
                f"({name} without {share:.0%} of its "
                "change)"
            )
        findings.append(
            Finding(
                message=f"after save and load {' and '.join(what)}: what was trained there is lost. Save them too "
                "(PEFT: modules_to_save).",
                where=Where(parameter=bad[0]),
                measured=Quantity(value=len(bad), unit="trained parameters lost"),
                expected=Quantity(value=0, unit="trained parameters lost"),
                remedy="save every trainable parameter",
            )
        )
    power = Power(quantity="trained parameters lost", smallest_detectable=1, unit="parameters")
    return answer(
        findings, power=power, reason=f"{counted(saved.num_compared, 'trainable parameter')} compared after save and load"
    )
