"""GS002."""

from ghoststep.evidence.checkpoint import Declared, Tables
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check


@check(code="GS002", severity=Severity.ERROR, basis=Basis.PROOF)
def vocab_size_disagreement(tables: Tables, declared: Declared) -> Answer:
    """The config's vocabulary size and the stored tables disagree.

    ## What it finds
    `vocab_size` of the config ≠ rows of the input table, or rows of a separate output head ≠ rows of the input table.

    ## Why it matters
    Loaders build tables of the declared size. Strict ones refuse; tolerant ones (`ignore_mismatched_sizes=True`, hand-written
    `load_state_dict(strict=False)`) leave the whole table at its random initialisation and go on. A head of another size
    scores tokens that cannot be fed, or none for tokens that can.

    ## When it is not a problem
    A tokenizer smaller than the table (alignment padding) is normal and silent here. A config without a vocabulary size is
    not judged.

    ## How to confirm by hand
    `config.vocab_size` against the shapes in the safetensors header.

    ## How to fix
    Set `vocab_size` to the number of table rows, or resize both tables with `resize_token_embeddings` and save again.

    ## Options
    None.

    ## References
    None.
    """
    if declared.vocab_size is None and tables.output is None:
        return NotApplicable(reason="the config declares no vocabulary size and there is one table only")
    findings = []
    size, rows = declared.vocab_size, tables.input.num_rows
    if size is not None and size != rows:
        findings.append(
            Finding(
                message=f"{declared.vocab_size_key} is {size}, but the input table {tables.input.tensor.name} has {rows} rows: a "
                "strict loader refuses it, a tolerant one trains a randomly initialised table. Set the config to the table's "
                "rows, or resize and save again.",
                where=Where(file=declared.file, tensor=tables.input.tensor.name),
                measured=Quantity(value=rows, unit="table rows"),
                expected=Quantity(value=size, unit=declared.vocab_size_key or "vocab_size"),
                remedy=f"set {declared.vocab_size_key} to {rows}",
            )
        )
    if tables.output is not None and tables.output.num_rows != rows:
        findings.append(
            Finding(
                message=f"the output head {tables.output.tensor.name} has {tables.output.num_rows} rows, the input table "
                f"{tables.input.tensor.name} has {rows}: tokens exist on one side only. Resize both together.",
                where=Where(file=tables.output.tensor.file, tensor=tables.output.tensor.name),
                measured=Quantity(value=tables.output.num_rows, unit="output table rows"),
                expected=Quantity(value=rows, unit="input table rows"),
                remedy="model.resize_token_embeddings(...) resizes both",
            )
        )
    power = Power(quantity="difference in table rows", smallest_detectable=1, unit="table rows")
    return answer(findings, power=power, reason=f"{rows} table rows as declared")
