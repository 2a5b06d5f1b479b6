"""GS903."""

from ghoststep.evidence.tool import ToolRun
from ghoststep.finding import Basis, Finding, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check


@check(code="GS903", severity=Severity.WARNING, basis=Basis.PROOF)
def expired_acceptance(run: ToolRun, *, warn_days: int = 14) -> Answer:
    """An accepted finding reaches its end date.

    ## What it finds
    Acceptances in `[tool.ghoststep]` whose `until` day is past (they no longer apply) or at most `warn_days` days away.

    ## Why it matters
    An acceptance says "known, until then". When the day passes unnoticed, a build fails at a bad moment, or, worse, an
    acceptance without an end hides the flaw for ever.

    ## When it is not a problem
    Never silent on purpose: extend the date with a fresh reason if the flaw is still accepted.

    ## How to confirm by hand
    Compare `until` of the acceptance with today's date (UTC).

    ## How to fix
    Repair what was accepted and remove the entry, or move `until` and say why.

    ## Options
    `warn_days`: how many days ahead to warn; 14 by default.

    ## References
    The rule is ghoststep's own.
    """
    if not run.acceptances:
        return NotApplicable(reason="no acceptance is configured")
    findings = []
    for use in run.acceptances:
        if use.days_left > warn_days:
            continue
        if use.days_left < 0:
            what = f"ended on {use.until}, {-use.days_left} days ago: it no longer applies"
        else:
            what = f"ends on {use.until}, in {use.days_left} days"
        findings.append(
            Finding(
                message=f"the acceptance {use.place!r} ({use.reason}) {what}. Repair the flaw or move `until` and say why.",
                where=Where(file=use.file),
                measured=Quantity(value=use.days_left, unit="days left"),
                remedy="edit [[tool.ghoststep.accept]]",
            )
        )
    return answer(findings)
