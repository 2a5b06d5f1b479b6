"""GS508."""

from ghoststep.evidence.training import ContrastiveProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, Unknown, answer, check


@check(code="GS508", severity=Severity.ERROR, basis=Basis.PROOF)
def duplicate_positives(probe: ContrastiveProbe, *, error_fraction: float = 0.5) -> Answer:
    """A contrastive loss pushes examples away from texts that equal their own positive.

    ## What it finds
    Pairs of examples whose target has the very same token ids as a target that the example is pulled to, where the loss, driven
    with orthogonal embeddings, pushes them apart.

    ## Why it matters
    The same text is pulled and pushed at once: the loss keeps a floor, and the embeddings of frequent texts are spoilt.

    ## When it is not a problem
    A loss that masks duplicates, or takes all of them as positives (class labels).

    ## How to confirm by hand
    Count equal texts in one column of the batch.

    ## How to fix
    A batch sampler without duplicates, or mask equal targets out of the negatives.

    ## Options
    `error_fraction`: share of the examples from which this is an error, below it a warning (0.5).

    ## References
    None.
    """
    if not probe.duplicates_looked_at:
        return Unknown(reason="the texts behind the embeddings could not be matched to them")
    power = Power(quantity="examples pushed away from their own positive", smallest_detectable=1, unit="examples")
    touched = {i for i, _ in probe.duplicates}
    findings = []
    if touched:
        i, j = probe.duplicates[0]
        share = len(touched) / probe.num_examples
        findings.append(
            Finding(
                message=f"{len(touched)} of {probe.num_examples} examples are pushed away from a text that equals "
                f"their own positive (example {i} from "
                f"that of example {j}): the same token ids are pulled and pushed at once. Use a batch sampler without "
                "duplicates, or mask "
                "equal targets out of the negatives.",
                where=Where(example=i),
                measured=Quantity(value=len(touched), unit="examples"),
                expected=Quantity(value=0, unit="examples"),
                severity=Severity.ERROR if share >= error_fraction else Severity.WARNING,
                remedy="no duplicates in a batch",
            )
        )
    return answer(findings, power=power)
