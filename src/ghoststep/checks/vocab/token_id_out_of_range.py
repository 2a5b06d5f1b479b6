"""GS001."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import FedIds
from ghoststep.evidence.checkpoint import Tables
from ghoststep.evidence.tokenizer import TemplateTokens, Vocabulary
from ghoststep.finding import Basis, Finding, Outcome, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, Found, NotApplicable, Unknown, answer, check
from ghoststep.text import printable


@check(code="GS001", severity=Severity.ERROR, basis=Basis.PROOF)
def token_id_out_of_range(
    tables: Tables | Missing, vocabulary: Vocabulary | Missing, template: TemplateTokens | Missing, fed: FedIds | Missing
) -> Answer:
    """The tokenizer, or a batch, has ids for which the input table has no row.

    ## What it finds
    In a setup: ids in the batches that are negative or ≥ the number of input table rows, with their places. In a tokenizer:
    max id ≥ number of input table rows. One finding, at the first id without a row. A warning where that is one
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
    in_batch = _in_batches(fed) if isinstance(fed, FedIds) and fed.beyond else []
    missing = next((m for m in (tables, vocabulary) if isinstance(m, Missing)), None)
    if in_batch:
        return Found(findings=tuple(in_batch), reason=None if missing is None else f"the tokenizer's ids: {missing.reason}")
    if isinstance(tables, Missing) or isinstance(vocabulary, Missing):
        assert missing is not None
        return (
            NotApplicable(reason=missing.reason)
            if missing.outcome is Outcome.NOT_APPLICABLE
            else Unknown(reason=missing.reason)
        )
    return _of_tokenizer(tables, vocabulary, template, can_resize=not isinstance(fed, FedIds) or fed.can_resize)


def _in_batches(fed: FedIds) -> list[Finding]:
    first = fed.beyond[0]
    place = "" if first.example is None else f" (example {first.example}, position {first.position})"
    more = f" ({fed.num_beyond} positions hold such ids)" if fed.num_beyond > 1 else ""
    what = "-100 marks labels that are left out of the loss; as an input it has no meaning. " if first.token_id == -100 else ""
    resize = f"or resize the table: model.resize_token_embeddings({max(p.token_id for p in fed.beyond) + 1})"
    advice = "use the tokenizer that belongs to this model" + (f", {resize}" if fed.can_resize and first.token_id >= 0 else "")
    return [
        Finding(
            message=f"batch {first.batch} holds the id {first.token_id}{place}, but {fed.table} has {fed.num_rows} rows{more}: the "
            f"look-up raises on CPU and kills the process's device on GPU. {what}Look where these ids are made; {advice}.",
            where=Where(tensor=fed.table, token_id=first.token_id, example=first.example, position=first.position,
                        micro_batch=first.batch),
            measured=Quantity(value=first.token_id, unit="token id"),
            expected=Quantity(value=fed.num_rows - 1, unit="largest table row"),
            remedy=advice,
        )
    ]  # fmt: skip


def _of_tokenizer(tables: Tables, vocabulary: Vocabulary, template: TemplateTokens | Missing, *, can_resize: bool) -> Answer:
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
                remedy=f"model.resize_token_embeddings({vocabulary.max_id + 1}, pad_to_multiple_of=64)"
                if can_resize
                else f"make the input table {vocabulary.max_id + 1} rows or more, and the head with it",
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
