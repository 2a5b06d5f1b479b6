"""GS303."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, StoredTensors
from ghoststep.evidence.plan import TrainingPlan
from ghoststep.evidence.rows import InputRows
from ghoststep.evidence.tokenizer import TemplateTokens, Vocabulary
from ghoststep.finding import Basis, Finding, Outcome, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check
from ghoststep.severity import SPIKE_NORM, trains_tables
from ghoststep.text import printable


@check(code="GS303", severity=Severity.ERROR, basis=Basis.PROOF)
def dead_template_rows(
    inputs: InputRows,
    template: TemplateTokens | Missing,
    vocabulary: Vocabulary | Missing,
    declared: Declared | Missing,
    stored: StoredTensors | Missing,
    plan: TrainingPlan,
) -> Answer:
    """The chat template emits tokens whose input rows were never trained, so that the model cannot tell them apart.

    ## What it finds
    Ids that the rendered chat template really emits, or that the tokenizer puts in front of every text (BOS), and whose input
    row is exactly zero, near zero (norm under 1e-6), or bit-identical to another table row.

    ## Why it matters
    Role markers carry the structure of a conversation. With a frozen table (LoRA, frozen embeddings) these rows stay as they
    are: user and assistant markers look the same to the model for the whole run, and it can never learn the format. That is an
    error. With a trained table the rows start from nothing: a warning for zero and near-zero rows, a note for identical ones,
    which the first steps tell apart.

    ## When it is not a problem
    The template does not use the tokens (reserved rows, alignment padding).

    ## How to confirm by hand
    `tok.apply_chat_template(messages, tokenize=True)`, then the norms of `w[ids]` and their pairwise distances.

    ## How to fix
    Initialise the rows (mean of the trained rows plus noise of their spread) and train them: with PEFT name the embedding in
    `modules_to_save` or the ids in `trainable_token_indices`. Or use markers that the base model has seen.

    ## Options
    None.

    ## References
    Reported in public for reserved tokens used as role markers under LoRA.
    """
    rows = inputs.rows
    table = rows.table.tensor
    emitted = _emitted(template, vocabulary)
    if not emitted:
        if isinstance(template, TemplateTokens):
            return NotApplicable(reason="the chat template emits no token of its own")
        return (NotApplicable if template.outcome is Outcome.NOT_APPLICABLE else Unknown)(reason=template.reason)
    frozen = not trains_tables(plan, stored)
    padding = declared.pad_token_ids if isinstance(declared, Declared) else ()
    partners = {i: group for group in rows.identical_groups for i in group}
    findings = []
    for token_id, (token, emitter) in emitted.items():
        if token_id >= rows.table.num_rows:
            continue  # token-id-out-of-range says so
        norm = float(rows.norms_R[token_id])
        dead = bool(rows.zero_R[token_id]) or norm * inputs.multiplier < SPIKE_NORM
        if not dead and token_id not in partners:
            continue
        if rows.zero_R[token_id] and token_id in padding:
            continue  # padding_idx keeps it at zero: zero-input-rows says so
        where = Where(file=table.file, tensor=table.name, table_row=token_id, token_id=token_id, token=token)
        group = partners.get(token_id, ())
        findings.append(_finding(inputs, where, emitter, group, frozen=frozen, dead=dead))
    power = Power(quantity="template input rows near zero or identical", smallest_detectable=SPIKE_NORM, unit="L2 norm")
    undecided = None
    if isinstance(template, Missing) and template.outcome is not Outcome.NOT_APPLICABLE:
        undecided = template.reason
    inside = sum(i < rows.table.num_rows for i in emitted)
    return answer(findings, power=power, reason=f"{inside} template tokens have rows of their own", undecided=undecided)


def _emitted(template: TemplateTokens | Missing, vocabulary: Vocabulary | Missing) -> dict[int, tuple[str, str]]:
    """Id → its string and who emits it."""
    emitted: dict[int, tuple[str, str]] = {}
    if isinstance(vocabulary, Vocabulary):
        puts = "the tokenizer puts in front of every text"
        emitted.update({i: (vocabulary.added.get(i, ""), puts) for i in vocabulary.prefix_ids})
    if isinstance(template, TemplateTokens):
        emitted.update({i: (template.texts.get(i, ""), "the chat template emits") for i in template.ids})
    return emitted


def _finding(inputs: InputRows, where: Where, emitter: str, group: tuple[int, ...], *, frozen: bool, dead: bool) -> Finding:
    rows = inputs.rows
    table_row = where.table_row or 0
    norm = float(rows.norms_R[table_row])
    if rows.zero_R[table_row]:
        state = "is exactly zero"
    elif dead:
        state = f"has norm {norm:.3g}"
    else:
        others = ", ".join(str(i) for i in group if i != table_row)
        state = f"is bit-identical to table row {others}" if len(group) == 2 else f"is one of {len(group)} identical table rows"
    effect = (
        "the table is frozen, so the model can never tell this marker from others like it"
        if frozen
        else "the model has to learn this marker from nothing"
    )
    rounded = (
        "" if dead or not rows.storage_note else f" The table is stored as {rows.storage}: rounding may have made them equal."
    )
    return Finding(
        message=f"{emitter} {printable(where.token or '')}, whose input row {state}: it was never trained, and {effect}. "
        f"Initialise the row and train it, or use a marker that the base model has seen.{rounded}",
        where=where,
        measured=Quantity(value=norm, unit="L2 norm"),
        expected=Quantity(value=rows.median_norm, unit="L2 norm (median)"),
        severity=Severity.ERROR if frozen else Severity.WARNING if dead else Severity.NOTE,
        basis=Basis.MEASURED if rounded else Basis.PROOF,
        remedy="initialise the row; with PEFT add the id to trainable_token_indices or the embedding to modules_to_save",
    )
