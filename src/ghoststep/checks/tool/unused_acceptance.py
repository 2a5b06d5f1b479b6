"""GS902."""

from ghoststep.evidence.tool import ToolRun
from ghoststep.finding import Basis, Finding, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check


@check(code="GS902", severity=Severity.WARNING, basis=Basis.PROOF)
def unused_acceptance(run: ToolRun) -> Answer:
    """An acceptance covers no finding.

    ## What it finds
    Acceptances in `[tool.ghoststep]` that matched nothing although their check ran and could look.

    ## Why it matters
    The flaw is gone, or the place was mistyped. A stale acceptance would hide the same flaw when it comes back.

    ## When it is not a problem
    When one configuration serves several subjects and only some have the flaw; the entry is then narrowed by `file`.

    ## How to confirm by hand
    Remove the entry and run the same command: the report does not change.

    ## How to fix
    Remove the entry, or correct its place.

    ## Options
    None.

    ## References
    The same idea as unused suppressions in linters.
    """
    if not run.acceptances:
        return NotApplicable(reason="no acceptance is configured")
    unseen = [use.place for use in run.acceptances if not use.checked]
    findings = [
        Finding(
            message=f"the acceptance {use.place!r} ({use.reason}) covers no finding of this run. Remove it or correct its place.",
            where=Where(file=use.file),
            measured=Quantity(value=0, unit="findings covered"),
            remedy="edit [[tool.ghoststep.accept]]",
        )
        for use in run.acceptances
        if use.checked and use.num_matched == 0
    ]
    undecided = f"the checks behind these acceptances could not look: {', '.join(unseen)}" if unseen else None
    return answer(findings, undecided=undecided)
