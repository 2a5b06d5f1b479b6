"""GS011."""

from ghoststep.evidence.checkpoint import Declared
from ghoststep.finding import Basis, Finding, Severity, Where
from ghoststep.registry import Answer, answer, check
from ghoststep.text import visible


@check(code="GS011", severity=Severity.WARNING, basis=Basis.PROOF)
def unusable_config_value(declared: Declared) -> Answer:
    """A config value has the wrong type or an impossible size.

    ## What it finds
    Among the keys that describe the vocabulary, the sizes, the tie and the special tokens: a string where a number belongs, a
    number outside any possible range, a list where one value belongs. One finding a value.

    ## Why it matters
    Strict loaders fail on it. Tolerant ones fall back to a default or go by the truth of the value (`"false"` is true), and the
    model that is built is not the one that was trained. ghoststep takes the key as not given, so that checks which need it
    answer less than they could.

    ## When it is not a problem
    `null` is "not given", and -1 as a token id is an old way to say "none": both are silent.

    ## How to confirm by hand
    Look at the key in the file that is named.

    ## How to fix
    Write the value with its proper type: a number without quotes, `true` or `false` without quotes.

    ## Options
    None.

    ## References
    None.
    """
    findings = []
    for problem in declared.problems:
        file, _, what = problem.partition(": ")
        key = what.partition(" is ")[0]
        findings.append(
            Finding(
                message=f"{visible(what)}: a strict loader fails on it, a tolerant one guesses. Correct the value in {file}.",
                where=Where(file=file, key=key),
            )
        )
    return answer(findings, reason="every value that ghoststep reads has a usable type and size")
