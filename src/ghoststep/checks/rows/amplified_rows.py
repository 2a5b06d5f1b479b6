"""GS305."""

from ghoststep.evidence.amplification import LOST_FACTOR, MIDDLE, Amplification, Place, Reading, SpikedStep
from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.rows import InputRows
from ghoststep.evidence.tokenizer import Reach, SuspectReach
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.row_measurement import consequence_of, train_step_text
from ghoststep.severity import SPIKE_NORM
from ghoststep.text import counted, printable


@check(
    code="GS305",
    severity=Severity.ERROR,
    basis=Basis.MEASURED,
    explains_anywhere=("nonfinite-gradient", "unchanged-weights", "gradients-cleared-before-step"),
)
def amplified_rows(
    amplified: Amplification,
    inputs: InputRows,
    batch: BatchFacts,
    reach: SuspectReach | Missing,
    spiked: SpikedStep | Missing,
    *,
    lost_factor: float = LOST_FACTOR,
) -> Answer:
    """A near-zero input row whose gradient, on this very model, is so large that one occurrence takes the whole step.

    ## What it finds
    Near-zero rows of the input table (effective norm under 1e-6) are fed into one position of the first batch, through the real
    model, dtype and loss: at the first position, in the middle, at the start of a packed document and after left padding, as
    far as the batch has them. Found if the gradient of the row is above `lost_factor` clip bounds, or not finite. A gradient of
    exactly 0 is no evidence: no loss depends on that position. Unknown if nothing else was measured in the middle.

    ## Why it matters
    Beyond a thousand clip bounds everything else in the step shrinks a thousandfold; beyond 1.8e19 the float32 norm is inf and
    clipping sets every gradient to 0. The loss stays ordinary.

    Amplified in the middle of a text it is an error; at the first position only (attention-only models), an error if the batch
    has the token there, else a warning.

    ## When it is not a problem
    Nothing feeds the token; the step is clipped by `ghoststep.clip_grad_norm_`, which caps such rows; the table is frozen.

    ## How to confirm by hand
    Put the token into a batch, call backward, and print `embedding.weight.grad[row].double().norm()`.

    ## How to fix
    Before training, set the row to a small random vector of a tenth of the median norm (`ghoststep fix` for a checkpoint), or
    clip with `ghoststep.clip_grad_norm_(model, max_norm)`.

    ## Options
    `lost_factor`: clip bounds that a row's gradient must reach (1e3).

    ## References
    Measured by `scripts/bench amplification` on small random models (L2 norm, row of 1e-30, 30 loss tokens): 7e29 in Mamba-2 and
    3e28 in MiniMax mid-sequence (12 layers), 3e28 in Llama (24 layers) and 2e29 in Gemma-3 (12) at the first position; 0.5 in
    Llama mid-sequence, 0.3 in GPT-2 anywhere.
    """
    fed = _fed(batch)
    rows = sorted({r.table_row for p in amplified.places for r in p.readings})
    findings, kept = [], 0
    for table_row in rows:
        kind = reach.reach.get(table_row) if isinstance(reach, SuspectReach) else None
        if kind in (Reach.NO_TOKEN, Reach.UNREACHABLE) and table_row not in fed:
            continue
        worst = amplified.worst(table_row)
        if worst is None or worst[1].gradient <= lost_factor * amplified.bound:
            continue
        if isinstance(spiked, SpikedStep) and spiked.survives:
            kept += 1
            continue
        is_fed = table_row in fed or kind in (Reach.REACHABLE, Reach.TEMPLATE)
        anywhere = _is_amplified(amplified, table_row, lost_factor, MIDDLE)
        severity = Severity.ERROR if is_fed and (anywhere or fed.get(table_row, False)) else Severity.WARNING
        findings.append(_finding(amplified, inputs, reach, worst, severity, spiked))
    if not findings and not kept and not any(p.name == MIDDLE for p in amplified.measured):
        return Unknown(reason=_not_measured(amplified))
    where = ", ".join(p.name for p in amplified.measured)
    power = Power(
        quantity=f"gradient of a row, at the {where}", smallest_detectable=lost_factor * amplified.bound, unit="L2 norm"
    )
    near = int((inputs.rows.norms_R * inputs.multiplier < SPIKE_NORM).sum())
    reason = f"{counted(near, 'row is', 'rows are')} near zero, and none is amplified here"
    if kept and isinstance(spiked, SpikedStep):
        reason = f"{counted(kept, 'row is', 'rows are')} amplified, and your own train_step keeps everything else in the step"
    return answer(findings, power=power, reason=None if findings else reason)


def _not_measured(amplified: Amplification) -> str:
    places = ", ".join(p.name for p in amplified.measured)
    return (
        f"only the {places} was measured, where no row is amplified: no loss depends on a position in the middle of a text"
        if places
        else "every gradient is exactly 0: no loss depends on the positions that rows were fed at, so nothing was measured"
    )


def _fed(batch: BatchFacts) -> dict[int, bool]:
    """Ids at real positions of the batch; True for those that stand first in what an example or a packed document sees."""
    fed: dict[int, bool] = {}
    for b, ids_T in enumerate(batch.ids_BT.tolist()):
        before = None
        for t, token in enumerate(ids_T):
            if batch.padding_BT is not None and batch.padding_BT[b, t]:
                continue
            document = -1 if batch.document_BT is None else int(batch.document_BT[b, t])
            fed[token] = fed.get(token, False) or document != before
            before = document
    return fed


def _is_amplified(amplified: Amplification, table_row: int, lost_factor: float, name: str) -> bool:
    found = [r for p in amplified.places if p.name == name for r in p.readings if r.table_row == table_row]
    return any(not r.gradient <= lost_factor * amplified.bound for r in found)


def _finding(
    amplified: Amplification,
    inputs: InputRows,
    reach: SuspectReach | Missing,
    worst: tuple[Place, Reading],
    severity: Severity,
    spiked: SpikedStep | Missing,
) -> Finding:
    place, reading = worst
    token = reach.tokens.get(reading.table_row, "") if isinstance(reach, SuspectReach) else ""
    name = f"token {printable(token)} " if token else ""
    happens = consequence_of(reading, amplified.bound) + train_step_text(spiked)
    mine = [(p, r) for p in amplified.places if p is not place for r in p.readings if r.table_row == reading.table_row]
    elsewhere = "; ".join(f"{p.name} {f'{r.gradient:.2g}' if p.is_measured else 'not measured'}" for p, r in mine)
    return Finding(
        message=f"the input row {reading.table_row} {name}has norm {reading.norm:.3g} (median {inputs.rows.median_norm:.3g}), and "
        f"fed at the {place.name} its gradient is {reading.gradient:.3g}{f' ({elsewhere})' if elsewhere else ''}: {happens}. Set the "
        "row to a small random vector before training, or clip with ghoststep.clip_grad_norm_.",
        where=Where(table_row=reading.table_row, token_id=reading.table_row, token=token or None, example=place.example,
                    position=place.position),
        measured=Quantity(value=reading.gradient, unit="L2 norm of the row's gradient"),
        expected=Quantity(value=amplified.lost, unit="L2 norm, at most"),
        severity=severity,
        remedy="ghoststep.clip_grad_norm_(model, max_norm), or `ghoststep fix` for the checkpoint",
    )  # fmt: skip
