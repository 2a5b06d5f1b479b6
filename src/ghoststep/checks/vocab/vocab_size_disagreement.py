"""GS002."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, Table, Tables, fits_vocabulary
from ghoststep.evidence.tokenizer import Vocabulary
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check


@check(code="GS002", severity=Severity.ERROR, basis=Basis.PROOF)
def vocab_size_disagreement(tables: Tables, declared: Declared, vocabulary: Vocabulary | Missing) -> Answer:
    """The config's vocabulary size and the stored tables disagree.

    ## What it finds
    Input table, R rows, against `vocab_size` V of the config:

    - R < V: error.
    - R > V, and the config accounts for R by another key (`padded_vocab_size`, `embedding_size`, V + `additional_vocab_size`, V
      rounded up to `pad_vocab_size_multiple` or `make_vocab_size_divisible_by`): clear.
    - R > V, and a separate head has V rows, or R is V with a plausible number of alignment rows: note. Tokens that are only fed
      (images, sound, prompts), or padding that the model's code adds by itself.
    - R > V otherwise, or the tokenizer has ids from V on while the head has no V rows either: error. The config was left behind
      by a resize.

    Output head, H rows, if H is neither R nor V nor such a key: note where the tokenizer (without one, V) fits both tables and
    the difference can be padding; error where tokens have no output row, or H < V and no tokenizer says otherwise; else warning.

    ## Why it matters
    Loaders build tables of the declared size. Strict ones refuse; tolerant ones (`ignore_mismatched_sizes=True`, hand-written
    `load_state_dict(strict=False)`) leave the whole table at its random initialisation and go on. A head of another size
    scores tokens that cannot be fed, or none for tokens that can.

    ## When it is not a problem
    A tokenizer smaller than the table (alignment padding) is normal and silent here. A config without a vocabulary size is
    not judged. Model code that pads the table by itself agrees with its own checkpoints: a note, since files do not show code.

    ## How to confirm by hand
    `config.vocab_size` against the shapes in the safetensors header.

    ## How to fix
    Set `vocab_size` to the number of table rows, or resize both tables with `resize_token_embeddings` and save again.

    ## Options
    None.

    ## References
    The original Mamba and OLMo-1 configs give a vocabulary size below the padded table. Over the default configs of the
    language model classes of transformers 5.24 nothing above a note is said.
    """
    if declared.vocab_size is None and tables.output is None:
        return NotApplicable(reason="the config declares no vocabulary size and there is one table only")
    stored = [t for t in (tables.input, tables.output) if t is not None]
    unmeasured = "; ".join(t.unmeasured for t in stored if t.unmeasured is not None) or None
    findings, reason = [], f"{tables.input.num_rows} table rows"
    if tables.input.rows_measured:
        finding, words = _input(tables, declared, vocabulary)
        reason += words
        findings += [finding] if finding is not None else []
    if tables.output is not None and unmeasured is None:
        finding, words = _output(tables.output, tables.input, declared, vocabulary)
        reason += words
        findings += [finding] if finding is not None else []
    power = Power(quantity="difference in table rows", smallest_detectable=1, unit="table rows")
    return answer(findings, power=power, reason=reason, undecided=unmeasured)


def _input(tables: Tables, declared: Declared, vocabulary: Vocabulary | Missing) -> tuple[Finding | None, str]:
    """The input table against the config: what is found, or words for a clear answer."""
    size, rows, key = declared.vocab_size, tables.input.num_rows, declared.vocab_size_key or "vocab_size"
    if size is None:
        return None, ""
    if rows == size:
        return None, " as declared"
    head = tables.output.num_rows if tables.output is not None and tables.output.rows_measured else None
    if rows > size and rows in declared.table_sizes:
        return None, f", {rows - size} more than {key} {size}, as declared ({declared.table_sizes[rows]})"
    intro = f"{key} is {size}, but the input table {tables.input.tensor.name} has {rows} rows"
    severity = Severity.ERROR
    ids_beyond = isinstance(vocabulary, Vocabulary) and vocabulary.max_id >= size
    if rows > size and head == size:
        severity = Severity.NOTE
        why = (
            f"while the output head has {size}: the tokens of {rows - size} table rows can be fed and not predicted, as in models that "
            "read images or sound. Nothing to do if that is meant."
        )
    elif rows > size and fits_vocabulary(rows, size) and not ids_beyond:
        severity = Severity.NOTE
        why = (
            f"{rows - size} more, which can be padding that the model's own code adds. If it does not, a strict loader refuses the "
            f"table and a tolerant one trains a randomly initialised one: then set {key} to {rows}."
        )
    else:
        why = "a strict loader refuses it, a tolerant one trains a randomly initialised table. "
        if rows > size and isinstance(vocabulary, Vocabulary) and ids_beyond:
            why += f"The tokenizer's ids go up to {vocabulary.max_id}, so the table was resized and the config was not. "
        why += "Set the config to the table's rows, or resize and save again."
    return Finding(
        message=f"{intro}{', ' if severity is Severity.NOTE else ': '}{why}",
        where=Where(file=declared.file, tensor=tables.input.tensor.name),
        measured=Quantity(value=rows, unit="table rows"),
        expected=Quantity(value=size, unit=key),
        severity=severity,
        remedy=f"set {key} to {rows}" if severity is Severity.ERROR else None,
    ), ""


def _output(head: Table, first: Table, declared: Declared, vocabulary: Vocabulary | Missing) -> tuple[Finding | None, str]:
    """A separate head against the input table."""
    rows, size = head.num_rows, declared.vocab_size
    if rows in (first.num_rows, size):  # a head of vocab_size rows beside a larger input table was judged there
        return None, ""
    if rows in declared.table_sizes:
        return None, f"; {rows} output table rows, as declared ({declared.table_sizes[rows]})"
    needed = vocabulary.max_id + 1 if isinstance(vocabulary, Vocabulary) else size
    close = fits_vocabulary(max(rows, first.num_rows), min(rows, first.num_rows))
    if needed is not None and rows < needed:
        severity, why = Severity.ERROR, f"tokens from {rows} on can never be predicted. Resize both together."
    elif needed is not None and needed <= first.num_rows and close:
        severity, why = (
            Severity.NOTE,
            f"both hold all {needed} tokens; the rest can be padding. Resize both together to be sure.",
        )
    else:
        severity, why = Severity.WARNING, "tokens exist on one side only. Resize both together."
    return Finding(
        message=f"the output head {head.tensor.name} has {rows} rows, the input table {first.tensor.name} has "
        f"{first.num_rows}: {why}",
        where=Where(file=head.tensor.file, tensor=head.tensor.name),
        measured=Quantity(value=rows, unit="output table rows"),
        expected=Quantity(value=first.num_rows, unit="input table rows"),
        severity=severity,
        remedy="model.resize_token_embeddings(...) resizes both",
    ), ""
