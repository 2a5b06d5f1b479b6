"""GS901."""

from ghoststep.evidence.tool import ToolRun
from ghoststep.finding import Basis, Finding, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check


@check(code="GS901", severity=Severity.ERROR, basis=Basis.PROOF)
def broken_check(run: ToolRun) -> Answer:
    """A package of further checks could not be loaded, so that its silence means nothing.

    ## What it finds
    Packages under the entry point group `ghoststep.checks` that fail to import or hold a check with an unusable signature.
    (A check that loads and then raises has the verdict `broken` itself.)

    ## Why it matters
    A check that does not run looks like a check that found nothing. The exit code is 2.

    ## When it is not a problem
    Never. It is a defect of the check, not of what was checked.

    ## How to confirm by hand
    Import the named module: `python -c "import MODULE"`.

    ## How to fix
    Update or remove the package that is named; report the defect with the message shown.

    ## Options
    None.

    ## References
    The rule is ghoststep's own.
    """
    if not run.num_plugins:
        return NotApplicable(reason="no package of further checks is installed")
    findings = [
        Finding(
            message=f"the plugin {name!r} failed to load: {reason}. Its checks did not run; update, mend or uninstall it.",
            where=Where(module=name),
        )
        for name, reason in run.broken_plugins
    ]
    return answer(findings)
