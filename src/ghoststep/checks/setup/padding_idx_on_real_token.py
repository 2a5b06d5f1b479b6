"""GS605."""

from ghoststep.evidence.training import LiveWiring
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check

LARGE_ERROR = 0.5
"""With a table tied to the head: the error of the row's gradient, over the right gradient, from which on it is an error."""


@check(code="GS605", severity=Severity.ERROR, basis=Basis.PROOF)
def padding_idx_on_real_token(wiring: LiveWiring) -> Answer:
    """The embedding's `padding_idx` is a token that the batch feeds as a real one: its row never gets a gradient.

    ## What it finds
    Positions of the first batch that hold `padding_idx`, are attended (`attention_mask` 1; without a mask: not in a run at either
    end) and got a gradient at the embedding's output, which the embedding then throws away.

    ## Why it matters
    `torch.nn.Embedding` zeroes the gradient of that row. A row of the embedding that started at zero stays there: the model
    never learns what this token means as an input.

    ## When it is not a problem
    The id only pads. With a table tied to the head the row still moves by the head's gradient; what that is worth is measured: a
    warning while what the embedding drops is less than half of the row's whole gradient (an id that is a target far more often
    than an input) and the row is not zero.

    ## How to confirm by hand
    `model.get_input_embeddings().padding_idx`, and whether that id stands at positions with attention_mask 1.

    ## How to fix
    `embedding.padding_idx = None`, or pad with an id of its own.

    ## Options
    None.

    ## References
    Documentation of torch.nn.Embedding. Measured: tiny models of 11 classes whose next token depends on the id, 60 steps, loss
    above that of the same model without padding_idx: row of zeros, own head 0.2 to 4.1, tied 0.0 to 0.7; ordinary row, own head
    0.0 to 0.1, tied 0.0 to 0.6.
    """
    row = wiring.padding_row
    if row is None:
        if wiring.gradient_reason:
            return Unknown(reason=wiring.gradient_reason)
        return NotApplicable(reason="the input embedding has no padding_idx, or it is frozen")
    if wiring.gradient_reason:
        return Unknown(reason=wiring.gradient_reason)
    power = Power(quantity="attended positions with padding_idx", smallest_detectable=1, unit="positions")
    if row.num_real == 0:
        return answer((), power=power, reason=f"padding_idx {row.index} is not fed as a real token in the first batch")
    masked = any(row.index in t.masked_rows for t in wiring.tables)
    state = "is exactly zero and stays so" if row.row_is_zero else "stays as it was loaded"
    left = f"its row moves only through the head it is shared with (its gradient is wrong by {row.gradient_error:.0%})"
    effect = f"its row {state}" if masked else left
    bad = masked or row.row_is_zero or row.gradient_error >= LARGE_ERROR
    example, position = row.place if row.place is not None else (None, None)
    finding = Finding(
        message=f"{row.module} has padding_idx={row.index}, but {row.num_real} positions of the first batch feed this "
        "id as a real token"
        + (f" (first at example {example}, position {position})" if row.place else "")
        + f": the embedding drops their gradient, {effect}. Set padding_idx to None or to an id that only pads.",
        where=Where(module=row.module, token_id=row.index, table_row=row.index, example=example, position=position),
        measured=Quantity(value=row.num_real, unit="positions"),
        expected=Quantity(value=0, unit="positions"),
        severity=Severity.ERROR if bad else Severity.WARNING,
        remedy="embedding.padding_idx = None",
    )
    return answer([finding])
