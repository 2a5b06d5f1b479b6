"""GS008."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Tables
from ghoststep.evidence.rows import InputRows, OutputRows, RowFacts
from ghoststep.evidence.tokenizer import Vocabulary
from ghoststep.finding import Basis, Finding, Outcome, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check

MAX_LISTED = 20


@check(code="GS008", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("nonfinite-loss",))
def nonfinite_weights(
    inputs: InputRows, outputs: OutputRows | Missing, tables: Tables | Missing, vocabulary: Vocabulary | Missing
) -> Answer:
    """An embedding table holds NaN or infinite values.

    ## What it finds
    Table rows, input or output, with at least one stored value that is NaN or ±inf. Only the vocabulary tables are read.

    ## Why it matters
    In the output head one such row makes the softmax, and so every loss, NaN. In the input table it makes every example that
    holds the token NaN. One in a padded row still poisons norms, weight decay statistics and quantisation scales.

    ## When it is not a problem
    A padded input row that nothing looks up does not reach the loss: a warning instead of an error.

    ## How to confirm by hand
    `(~torch.isfinite(w)).any(dim=1).nonzero()`.

    ## How to fix
    Take the rows from an earlier checkpoint, or re-initialise them, and find the step that wrote them.

    ## Options
    None.

    ## References
    None.
    """
    findings = _table(inputs.rows, "input", vocabulary)
    if isinstance(outputs, OutputRows) and not outputs.tied:
        findings += _table(outputs.rows, "output", vocabulary)
    power = Power(quantity="non-finite values in a table", smallest_detectable=1, unit="values")
    unread = [t.tensor.name for t in tables.others] if isinstance(tables, Tables) else []
    reason = f"not looked at: {', '.join(unread[:3])}" + (", ..." if len(unread) > 3 else "") if unread else None
    undecided = None
    if isinstance(outputs, Missing):
        if outputs.outcome is Outcome.NOT_APPLICABLE:
            reason = "; ".join(filter(None, ("there is no output head", reason)))
        else:
            undecided = f"the output head could not be read: {outputs.reason}"
    return answer(findings, power=power, reason=reason, undecided=undecided)


def _table(rows: RowFacts, side: str, vocabulary: Vocabulary | Missing) -> list[Finding]:
    bad = [int(i) for i in rows.nonfinite_R.nonzero()[0]]
    findings = []
    for table_row in bad[:MAX_LISTED]:
        padded = isinstance(vocabulary, Vocabulary) and table_row > vocabulary.max_id
        harmless = padded and side == "input"
        effect = "nothing looks it up, but norms and scales see it" if harmless else "every loss that meets it is NaN"
        more = f" ({len(bad)} such table rows in all)" if len(bad) > 1 else ""
        findings.append(
            Finding(
                message=f"{side} table row {table_row} holds NaN or inf{more}: {effect}. Take it from an earlier checkpoint or "
                "re-initialise it.",
                where=Where(
                    file=rows.table.tensor.file, tensor=rows.table.tensor.name, table_row=table_row, token_id=table_row
                ),
                measured=Quantity(value=len(bad), unit="non-finite table rows"),
                expected=Quantity(value=0, unit="non-finite table rows"),
                severity=Severity.WARNING if harmless else Severity.ERROR,
            )
        )
    return findings
