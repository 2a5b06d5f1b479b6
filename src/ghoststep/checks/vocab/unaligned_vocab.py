"""GS004."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, StoredTensors, Tables
from ghoststep.evidence.wiring import Tie, TieState
from ghoststep.finding import Basis, Finding, Quantity, Severity, Where
from ghoststep.registry import Answer, Clear, NotApplicable, Unknown, answer, check


@check(code="GS004", severity=Severity.NOTE, basis=Basis.RULE_OF_THUMB)
def unaligned_vocab(
    tables: Tables,
    stored: StoredTensors,
    tie: TieState,
    declared: Declared | Missing,
    *,
    multiple: int = 64,
    smallest_head_fraction: float = 0.05,
) -> Answer:
    """The vocabulary's table is not a multiple of 64 rows, so the head's matrix product runs off the fast path.

    ## What it finds
    Output rows % `multiple` ≠ 0, in a model whose head holds at least `smallest_head_fraction` of the stored parameters (its
    share of the matrix work of a step).

    ## Why it matters
    Speed only, on GPUs with tensor cores, and sharding: each tensor-parallel rank needs a whole number of rows. It never makes
    training wrong: a 67-row table trained as well as a 128-row one in our runs (last loss 0.174 against 0.206).

    ## When it is not a problem
    Small vocabularies, encoders without a head, CPU training.

    ## How to confirm by hand
    `model.lm_head.weight.shape[0] % 64`.

    ## How to fix
    `model.resize_token_embeddings(n, pad_to_multiple_of=64)`, and keep the padded rows out of softmax and loss.

    ## Options
    `multiple`: 64 by default; use the least common multiple with the tensor-parallel size.
    `smallest_head_fraction`: 0.05 by default; below it the head's time cannot matter.

    ## References
    The loss figures are our own measurement (CPU, one seed). The speed claim is general practice and was not re-measured.
    """
    if tie.tie is Tie.NO_HEAD:
        return NotApplicable(reason=f"no output head: {tie.reason}")
    head = tables.output or tables.input
    if head.unmeasured is not None:
        return Unknown(reason=head.unmeasured)
    over = head.num_rows % multiple
    if over == 0:
        return Clear(reason=f"{head.num_rows} = {multiple} x {head.num_rows // multiple} table rows")
    fraction = head.num_rows * head.num_dims / max(1, stored.num_parameters)
    if fraction < smallest_head_fraction:
        return NotApplicable(reason=f"the head is {fraction:.1%} of the parameters: its alignment cannot matter")
    padded = head.num_rows + multiple - over
    return answer(
        [
            Finding(
                message=f"{head.num_rows} table rows are not a multiple of {multiple}: the head's matrix product is slower than "
                f"it could be on GPUs (training is not wrong). Pad to {padded} rows and mask the padded ones.",
                where=Where(file=head.tensor.file, tensor=head.tensor.name),
                measured=Quantity(value=head.num_rows, unit="table rows"),
                expected=Quantity(value=padded, unit="table rows"),
                remedy=f"model.resize_token_embeddings({padded}, pad_to_multiple_of={multiple})"
                if isinstance(declared, Declared)  # a plain module without a config has no such method
                else f"make the tables {padded} rows, and keep the new ones out of softmax and loss",
            )
        ]
    )
