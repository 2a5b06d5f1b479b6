"""GS306."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.rows import InputRows
from ghoststep.evidence.tokenizer import Reach, SuspectReach
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check
from ghoststep.severity import SPIKE_NORM
from ghoststep.text import printable

_HAS_A_USE = (Reach.REACHABLE, Reach.SPECIAL, Reach.TEMPLATE, Reach.PARTIAL_UTF8)


@check(code="GS306", severity=Severity.ERROR, basis=Basis.PROOF)
def untrained_rows(inputs: InputRows, reach: SuspectReach | Missing, *, common_fraction: float = 0.05) -> Answer:
    """Tokens whose input rows were never trained: bit-identical to one another, or still at the common vector.

    ## What it finds
    - Groups of bit-identical table rows that are neither zero nor near zero (proof: two tokens that were ever trained apart do
      not stay equal).
      More than half the table in one group is an error: the table was overwritten or never initialised.
    - Table rows closer to a common vector (the mean, or a point that at least four rows crowd around) than `common_fraction`
      of the ordinary distance (rule of thumb). In one published model the untrained rows crowd far away from the mean.
    Untrained rows need not be small. Rows without a token (alignment padding) and tokens that nothing produces are left out.

    ## Why it matters
    The model cannot tell such tokens apart and has no idea what they mean; a prompt that holds one behaves oddly ("glitch
    tokens"). Used as markers under a frozen table they never work (see dead-template-rows).

    ## When it is not a problem
    As long as nothing uses the tokens. Most published models have a few.

    ## How to confirm by hand
    `(w[a] == w[b]).all()`; or take one such row `v` and list the rows with the
    smallest `(w - v).norm(dim=1)`.

    ## How to fix
    Train with data that holds the tokens, or initialise the rows before you use them; do not choose them as new markers.

    ## Options
    `common_fraction`: 0.05 by default. In a published 135M model the rows of identical groups lie at 0.000 to 0.003 and its
    trained template markers at 0.13 and more; in a published encoder the unused rows lie at 0.14 to 0.18.

    ## References
    The method of finding under-trained tokens by their rows is known from the literature on glitch tokens; the thresholds
    here were measured on two published models (SmolLM2-135M-Instruct, all-MiniLM-L6-v2).
    """
    rows = inputs.rows
    table = rows.table.tensor
    findings = []
    grouped: set[int] = set()
    for group in rows.identical_groups:
        if float(rows.norms_R[group[0]]) * inputs.multiplier < SPIKE_NORM:
            continue  # near-zero-input-rows says what these are
        grouped.update(group)
        members = [i for i in group if _is_used(i, reach)]
        if len(members) < 2:
            continue
        whole = len(members) * 2 > rows.table.num_rows
        findings.append(
            Finding(
                severity=Severity.ERROR if whole else Severity.NOTE,
                message=f"{len(members)} tokens have the very same input row (table rows {_some(members)}: "
                f"{_tokens(members, reach)}): they were never trained, and the model cannot tell them apart. Initialise a row before "
                "you use its token."
                + (
                    f" The table is stored as {rows.storage}: rows may have become equal by rounding."
                    if rows.storage_note
                    else ""
                ),
                where=Where(file=table.file, tensor=table.name, table_row=members[0], token_id=members[0]),
                measured=Quantity(value=len(members), unit="identical table rows"),
                expected=Quantity(value=1, unit="identical table rows"),
                basis=Basis.MEASURED if rows.storage_note else Basis.PROOF,
            )
        )
    close = (rows.common_distance_R < common_fraction) & ~rows.zero_R & ~rows.nonfinite_R
    suspects = [int(i) for i in close.nonzero()[0] if int(i) not in grouped]
    near = [i for i in suspects if _is_used(i, reach)]
    if near:
        near.sort(key=lambda i: float(rows.common_distance_R[i]))
        findings.append(
            Finding(
                message=f"{len(near)} tokens have input rows that hardly left the common vector (table rows {_some(near)}: "
                f"{_tokens(near, reach)}): they were trained little or not at all. Do not use them as markers.",
                where=Where(file=table.file, tensor=table.name, table_row=near[0], token_id=near[0]),
                measured=Quantity(value=float(rows.common_distance_R[near[0]]), unit="of the median distance"),
                expected=Quantity(value=common_fraction, unit="of the median distance, at least"),
                severity=Severity.NOTE,
                basis=Basis.RULE_OF_THUMB,
            )
        )
    undecided = None
    if isinstance(reach, Missing) and (grouped or suspects):
        undecided = (
            f"{len(grouped)} table rows are identical to others and {len(suspects)} lie at the common vector; which of them have "
            f"tokens is open: {reach.reason}"
        )
    if rows.common_distance_R.size and bool((rows.common_distance_R != rows.common_distance_R).all()):
        unmeasured = f"with {rows.table.num_dims} dims, distances to a common vector say nothing"
        undecided = "; ".join(filter(None, (undecided, unmeasured)))
    power = Power(quantity="distance to the common vector", smallest_detectable=common_fraction, unit="of the median distance")
    return answer(findings, power=power, undecided=undecided)


def _is_used(table_row: int, reach: SuspectReach | Missing) -> bool:
    return isinstance(reach, SuspectReach) and reach.reach.get(table_row, Reach.NO_TOKEN) in _HAS_A_USE


def _some(table_rows: list[int], most: int = 8) -> str:
    return ", ".join(map(str, table_rows[:most])) + (", ..." if len(table_rows) > most else "")


def _tokens(table_rows: list[int], reach: SuspectReach | Missing, most: int = 8) -> str:
    tokens = reach.tokens if isinstance(reach, SuspectReach) else {}
    shown = ", ".join(printable(tokens.get(i, ""), 40) for i in table_rows[:most])
    return shown + (", ..." if len(table_rows) > most else "")
