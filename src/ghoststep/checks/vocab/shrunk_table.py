"""GS009."""

from ghoststep.evidence.checkpoint import Tables
from ghoststep.evidence.tokenizer import Vocabulary
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, Unknown, answer, check


@check(code="GS009", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("token-id-out-of-range",))
def shrunk_table(tables: Tables, vocabulary: Vocabulary) -> Answer:
    """The table was cut to the number of tokens although ids have holes: trained rows of real tokens are gone.

    ## What it finds
    A tokenizer whose ids have holes (largest id + 1 > number of tokens) and an input table whose rows are that number of
    tokens, exactly or rounded up to a multiple of 8, 16, 32, 64 or 128, and still do not reach the largest id.

    ## Why it matters
    `resize_token_embeddings(len(tokenizer))` does this in one line. With holes, the last tokens (chat markers, stop tokens as a
    rule) lose their rows, and the ids that remain fail at the first look-up.

    ## When it is not a problem
    Without holes the number of tokens is enough.

    ## How to confirm by hand
    `len(tok)`, `max(tok.get_vocab().values()) + 1` and the table's rows.

    ## How to fix
    Take the table from the checkpoint before the resize; resize to the largest id + 1 or more.

    ## Options
    None.

    ## References
    One public tokenizer has 200,000 entries and a largest id of 200,018.
    """
    if tables.input.unmeasured is not None:
        return Unknown(reason=tables.input.unmeasured)
    rows, tokens, needed = tables.input.num_rows, vocabulary.num_tokens, vocabulary.max_id + 1
    rounded = {tokens} | {-(-tokens // multiple) * multiple for multiple in (8, 16, 32, 64, 128)}
    power = Power(quantity="table rows cut", smallest_detectable=1, unit="table rows")
    if needed <= tokens or rows >= needed or rows not in rounded:
        return answer((), power=power)
    finding = Finding(
        message=f"the input table {tables.input.tensor.name} has {rows} rows, which is the number of tokens ({tokens}), but ids go "
        f"up to {vocabulary.max_id} because {len(vocabulary.holes)} ids in between are unused: the rows of {needed - rows} ids were "
        "cut off. Take the table from before the resize; resize to the largest id + 1.",
        where=Where(file=tables.input.tensor.file, tensor=tables.input.tensor.name, table_row=rows),
        measured=Quantity(value=rows, unit="table rows"),
        expected=Quantity(value=needed, unit="table rows"),
        remedy=f"model.resize_token_embeddings({needed}, pad_to_multiple_of=64) on the earlier checkpoint",
    )
    return answer([finding])
