"""GS303."""

from ghoststep.evidence.intent import Intent
from ghoststep.evidence.rows import InputRows
from ghoststep.evidence.tokenizer import TemplateTokens
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check
from ghoststep.severity import SPIKE_NORM
from ghoststep.text import printable


@check(code="GS303", severity=Severity.ERROR, basis=Basis.PROOF)
def dead_template_rows(inputs: InputRows, template: TemplateTokens, intent: Intent) -> Answer:
    """The chat template emits tokens whose input rows were never trained, so that the model cannot tell them apart.

    ## What it finds
    Ids that the rendered chat template really emits and whose input row is exactly zero, near zero (norm under 1e-6), or
    bit-identical to another table row.

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
    frozen = not intent.training.trains_tables
    partners = {i: group for group in rows.identical_groups for i in group}
    findings = []
    for token_id in template.ids:
        if token_id >= rows.table.num_rows:
            continue  # token-id-out-of-range says so
        norm = float(rows.norms_R[token_id])
        dead = bool(rows.zero_R[token_id]) or norm * inputs.multiplier < SPIKE_NORM
        if not dead and token_id not in partners:
            continue
        findings.append(_finding(inputs, template, token_id, partners.get(token_id, ()), frozen=frozen, dead=dead))
    power = Power(quantity="template input rows near zero or identical", smallest_detectable=SPIKE_NORM, unit="L2 norm")
    return answer(findings, power=power, reason=f"{len(template.ids)} template tokens have rows of their own")


def _finding(
    inputs: InputRows, template: TemplateTokens, token_id: int, group: tuple[int, ...], *, frozen: bool, dead: bool
) -> Finding:
    rows = inputs.rows
    norm = float(rows.norms_R[token_id])
    token = template.texts.get(token_id, "")
    if rows.zero_R[token_id]:
        state = "is exactly zero"
    elif dead:
        state = f"has norm {norm:.3g}"
    else:
        others = ", ".join(str(i) for i in group if i != token_id)
        state = f"is bit-identical to table row {others}" if len(group) == 2 else f"is one of {len(group)} identical table rows"
    severity = Severity.ERROR if frozen else Severity.WARNING if dead else Severity.NOTE
    effect = (
        "the table is frozen, so the model can never tell this marker from others like it"
        if frozen
        else "the model has to learn this marker from nothing"
    )
    return Finding(
        message=f"the chat template emits {printable(token)}, whose input row {state}: it was never trained, and {effect}. "
        "Initialise the row and train it, or use a marker that the base model has seen.",
        where=Where(
            file=rows.table.tensor.file, tensor=rows.table.tensor.name, table_row=token_id, token_id=token_id, token=token
        ),
        measured=Quantity(value=norm, unit="L2 norm"),
        expected=Quantity(value=rows.median_norm, unit="L2 norm (median)"),
        severity=severity,
        remedy="initialise the row; with PEFT add the id to trainable_token_indices or the embedding to modules_to_save",
    )
