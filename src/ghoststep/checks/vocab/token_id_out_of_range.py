"""GS001."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Tables
from ghoststep.evidence.tokenizer import TemplateTokens, Vocabulary
from ghoststep.finding import Basis, Finding, Outcome, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.text import printable


@check(code="GS001", severity=Severity.ERROR, basis=Basis.PROOF)
def token_id_out_of_range(tables: Tables, vocabulary: Vocabulary, template: TemplateTokens | Missing) -> Answer:
    """The tokenizer has ids for which the input table has no row.

    ## What it finds
    max id of the tokenizer ≥ number of input table rows. One finding, at the first id without a row. A warning where that is one
    special token at the very end of the vocabulary which nothing emits: no role, not in the template, not put in front of texts.

    ## Why it matters
    Looking such an id up raises on CPU and stops with a device-side assert on GPU, hours into a run, when the first text with
    that token comes by; kernels without bounds checks read foreign memory instead and train on garbage.

    ## When it is not a problem
    More table rows than tokens is normal (alignment padding) and silent here. A text-only model may keep the tokenizer of its
    image-reading sisters, whose placeholder has no row: harmless until a text holds the placeholder literally.

    ## How to confirm by hand
    `max(tok.get_vocab().values())` against `model.get_input_embeddings().weight.shape[0]`.

    ## How to fix
    `model.resize_token_embeddings(max_id + 1, pad_to_multiple_of=64)`, and save model and tokenizer together. `len(tok)` is not
    enough when ids have holes.

    ## Options
    None.

    ## References
    A published text model has 262,144 table rows and `<image_soft_token>` = 262144 in its tokenizer.
    """
    if tables.input.unmeasured is not None:
        return Unknown(reason=tables.input.unmeasured)
    num_rows = tables.input.num_rows
    missing = [i for i in sorted(vocabulary.added) if i >= num_rows]
    first = missing[0] if missing else num_rows
    power = Power(quantity="ids without a table row", smallest_detectable=1, unit="ids")
    if vocabulary.max_id < num_rows:
        return answer((), power=power, reason=f"largest id {vocabulary.max_id}, {num_rows} table rows")
    token = vocabulary.added.get(first)
    unused = _is_one_unused_special(vocabulary, template, num_rows)
    used = sorted(i for i in template.ids if i >= num_rows) if isinstance(template, TemplateTokens) else []
    parts = [
        f"the tokenizer's ids go up to {vocabulary.max_id}, but the input table {tables.input.tensor.name} has {num_rows} rows: "
        f"{vocabulary.max_id + 1 - num_rows} ids have none"
        + (f" (added tokens among them: {_tokens(vocabulary, missing)})." if missing else ".")
    ]
    if used:
        parts.append(f"The chat template emits {len(used)} of them, so every conversation fails.")
    if unused:
        parts.append(
            "It is special, and neither the template nor the tokenizer emits it: only text that holds it literally does."
        )
    parts.append(
        f"Looking one up fails or reads foreign memory. Resize the table to {vocabulary.max_id + 1} rows or more, and save model "
        "and tokenizer together."
    )
    return answer(
        [
            Finding(
                message=" ".join(parts),
                where=Where(file=vocabulary.file, tensor=tables.input.tensor.name, token_id=first, token=token),
                measured=Quantity(value=vocabulary.max_id, unit="largest token id"),
                expected=Quantity(value=num_rows - 1, unit="largest table row"),
                severity=Severity.WARNING if unused else Severity.ERROR,
                remedy=f"model.resize_token_embeddings({vocabulary.max_id + 1}, pad_to_multiple_of=64)",
            )
        ]
    )


def _is_one_unused_special(vocabulary: Vocabulary, template: TemplateTokens | Missing, num_rows: int) -> bool:
    """True if only the last id lacks a row and nothing but its literal string produces it. An unread template proves nothing."""
    last = vocabulary.max_id
    if last != num_rows or last not in vocabulary.added_special:
        return False
    if isinstance(template, Missing) and template.outcome is not Outcome.NOT_APPLICABLE:
        return False
    emitted = template.ids if isinstance(template, TemplateTokens) else ()
    return last not in (*emitted, *vocabulary.prefix_ids, *vocabulary.special_ids.values())


def _tokens(vocabulary: Vocabulary, ids: list[int]) -> str:
    shown = ", ".join(f"{printable(vocabulary.added[i])} = {i}" for i in ids[:3])
    return shown + (", ..." if len(ids) > 3 else "")
