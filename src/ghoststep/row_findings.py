"""How near-zero and zero input rows are told: one builder for the two checks, so that both say the same things.

Every finding carries token, table row, norm, why this wiring amplifies it, what the trainer would do, what serving sees, and
the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ghoststep.evidence.amplification import Amplification, SpikedStep
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, StoredTensors
from ghoststep.evidence.plan import TrainingKind, TrainingPlan
from ghoststep.evidence.rows import InputRows, OutputRows
from ghoststep.evidence.tokenizer import SuspectReach, TemplateTokens, Vocabulary
from ghoststep.evidence.wiring import MixingClass
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, Unknown, answer
from ghoststep.row_measurement import NOT_MEASURED, Measured, measured_row
from ghoststep.severity import (
    HEALTHY_OUTPUT_FRACTION,
    Exposure,
    TokenExposure,
    amplification,
    amplifies,
    ceiling,
    consequence,
    exposures,
    padding_ids,
    row_severity,
    trains_tables,
)
from ghoststep.text import counted, printable

MAX_LISTED = 100
"""Findings listed one by one; the rest of a longer list is one finding that gives their number and table rows."""

REMEDY = (
    "before training, set these input rows to a small random vector of about a tenth of the median norm (never to zeros; `ghoststep "
    "fix` does it), or leave the tokens out of the data"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCase:
    """What is known about the input rows of one model when suspicious ones are judged."""

    inputs: InputRows
    outputs: OutputRows | Missing
    mixing: MixingClass | Missing
    exposures: Mapping[int, TokenExposure] | Missing
    asked: frozenset[int]
    padding: frozenset[int]
    declared_padding: frozenset[int]
    plan: TrainingPlan
    trains_tables: bool
    ceiling: float
    amplified: Amplification | Missing
    spiked: SpikedStep | Missing

    def measured(self, exposure: TokenExposure) -> Measured | None:
        """What a live model showed about this row, if there is one."""
        norm = float(self.inputs.rows.norms_R[exposure.table_row])
        return measured_row(self.amplified, self.spiked, exposure, norm, self.plan.training)


def row_case(
    inputs: InputRows,
    outputs: OutputRows | Missing,
    mixing: MixingClass | Missing,
    reach: SuspectReach | Missing,
    template: TemplateTokens | Missing,
    vocabulary: Vocabulary | Missing,
    declared: Declared | Missing,
    stored: StoredTensors | Missing,
    plan: TrainingPlan,
    amplified: Amplification | Missing = NOT_MEASURED,
    spiked: SpikedStep | Missing = NOT_MEASURED,
) -> RowCase:
    """Bring the facts together; see `severity.exposures`."""
    return RowCase(
        inputs=inputs,
        outputs=outputs,
        mixing=mixing,
        exposures=exposures(reach, template, vocabulary, declared) if isinstance(reach, SuspectReach) else reach,
        asked=frozenset(reach.reach) if isinstance(reach, SuspectReach) else frozenset(),
        padding=padding_ids(vocabulary, declared),
        declared_padding=frozenset(declared.pad_token_ids) if isinstance(declared, Declared) else frozenset(),
        plan=plan,
        trains_tables=trains_tables(plan, stored),
        ceiling=ceiling(*_depth(mixing, declared)),
        amplified=amplified,
        spiked=spiked,
    )


def _depth(mixing: MixingClass | Missing, declared: Declared | Missing) -> tuple[int | None, float]:
    """Layers of the model, and the smallest epsilon of its normalisations that the config names (1e-6 if none)."""
    layers = declared.num_layers if isinstance(declared, Declared) else None
    if layers is None and isinstance(mixing, MixingClass):
        layers = max(mixing.num_recurrent_layers or 0, mixing.num_attention_layers or 0) or None
    raw = declared.raw if isinstance(declared, Declared) else {}
    epsilons = [v for k, v in raw.items() if k.endswith(("eps", "epsilon")) and isinstance(v, float) and 0 < v < 1]
    return layers, min(epsilons, default=1e-6)


_UNDECIDED = {
    Exposure.UNDETERMINED: "belong to parts of multi-byte characters: text in other scripts may produce them, so count them in a "
    "sample of the corpus",
    Exposure.UNRENDERED: "belong to special tokens that the chat template may emit, which could not be rendered",
}


def judge_rows(case: RowCase, table_rows: Sequence[int], *, zero: bool, looked_for: str, power: Power) -> Answer:
    """Judge these suspicious table rows: found, undecided, or clear with the given power."""
    if not case.trains_tables:
        kind = case.plan.training.value
        said = f"--training {kind}" if case.plan.training_declared else f"training {kind}, as this setup shows"
        return NotApplicable(
            reason=f"{said}: the table is frozen, so its rows get no gradient "
            "(dead-template-rows judges what a frozen row does)"
        )
    if isinstance(case.exposures, Missing):
        open_rows = [i for i in table_rows if i not in case.padding]
        if not open_rows:
            return answer((), power=power)
        shown = _rows_text(open_rows)
        them = counted(len(open_rows), "table row is", "table rows are")
        return Unknown(reason=f"{them} {looked_for} ({shown}); whether anything feeds them is open: {case.exposures.reason}")
    findings: list[Finding] = []
    reserved: list[TokenExposure] = []
    undecided: dict[str, list[int]] = {}
    harmless = 0
    for table_row in table_rows:
        exposure = case.exposures.get(table_row)
        if table_row not in case.asked:
            undecided.setdefault("were not looked up in the tokenizer", []).append(table_row)
            continue
        if exposure is None:
            continue  # no token: alignment padding
        severity = row_severity(exposure, case.mixing, case.plan.training, zero=zero)
        if exposure.exposure in _UNDECIDED:
            undecided.setdefault(_UNDECIDED[exposure.exposure], []).append(table_row)
        elif exposure.exposure is Exposure.RESERVED:
            reserved.append(exposure)
        elif severity is None:
            harmless += 1
        else:
            measured = case.measured(exposure)
            findings.append(_finding(case, exposure, measured.severity if measured else severity, measured, zero=zero))
    findings.sort(key=lambda f: (-(f.severity or Severity.NOTE).rank, f.measured.value if f.measured else 0))
    findings = _bounded(case, findings)
    if reserved:
        findings.append(_reserved_finding(case, reserved, looked_for))
    still_open = [
        f"{counted(len(rows), 'table row is', 'table rows are')} {looked_for} and {why} ({_rows_text(rows)})"
        for why, rows in undecided.items()
    ]
    if findings and isinstance(case.mixing, Missing):
        still_open.append(f"wiring unknown: {case.mixing.reason}")
    reason = (
        f"{counted(harmless, 'table row is', 'table rows are')} {looked_for}, and nothing produces the tokens"
        if harmless
        else None
    )
    return answer(findings, power=power, reason=reason, undecided="; ".join(still_open) or None)


def _finding(case: RowCase, exposure: TokenExposure, severity: Severity, measured: Measured | None, *, zero: bool) -> Finding:
    if zero and exposure.table_row in case.declared_padding:
        return _padding_finding(case, exposure)
    rows = case.inputs.rows
    norm = float(rows.norms_R[exposure.table_row])
    token = printable(exposure.token)
    what = "is exactly zero" if zero else f"has norm {norm:.3g} (median {rows.median_norm:.3g})"
    parts = [f"the input row of token {token} {what}, and {exposure.exposure.value}."]
    parts.append(measured.text if measured else f"{_capital(amplification(case.mixing, exposure))}.")
    if not measured and amplifies(case.mixing, exposure):
        happens = consequence(norm * case.inputs.multiplier, case.ceiling)
        parts.append(f"One occurrence in a batch can be enough: {happens}.")
        if zero:
            parts.append("A row of exact zeros can also turn gradients into NaN in deep models.")
    if case.plan.training is TrainingKind.RL and exposure.exposure is Exposure.TEMPLATE:
        parts.append("Under RL every prompt feeds it.")
    parts.append(_serving(case, exposure.table_row))
    if zero and rows.storage_note:
        parts.append(f"{_capital(rows.storage_note)}.")
    return Finding(
        message=" ".join(p for p in parts if p),
        where=Where(
            file=rows.table.tensor.file,
            tensor=rows.table.tensor.name,
            table_row=exposure.table_row,
            token_id=exposure.table_row,
            token=exposure.token,
        ),
        measured=Quantity(value=norm, unit="L2 norm"),
        expected=Quantity(value=rows.median_norm, unit="L2 norm (median)"),
        severity=severity,
        basis=Basis.PROOF if zero else Basis.MEASURED,
        remedy=REMEDY,
    )


def _padding_finding(case: RowCase, exposure: TokenExposure) -> Finding:
    """A zero row that is also the config's padding id: `padding_idx` makes it zero and gives it no gradient."""
    table = case.inputs.rows.table.tensor
    return Finding(
        message=f"the input row of token {printable(exposure.token)} is exactly zero because its id {exposure.table_row} is also the "
        "config's padding id: torch's padding_idx keeps that row at zero and gives it no gradient, so it is no danger, but the "
        "token is never trained either. Give padding an id of its own.",
        where=Where(
            file=table.file, tensor=table.name, table_row=exposure.table_row, token_id=exposure.table_row, token=exposure.token
        ),
        measured=Quantity(value=0.0, unit="L2 norm"),
        severity=Severity.NOTE,
        basis=Basis.PROOF,
        remedy="add a padding token and set pad_token_id to it",
    )


def _serving(case: RowCase, table_row: int) -> str:
    if isinstance(case.outputs, Missing):
        return ""
    rows = case.outputs.rows
    if case.outputs.tied:
        return "Input and output share this row: it is dead on both sides, until the first steps of softmax gradient lift it."
    if table_row >= rows.table.num_rows:
        return f"The output head has no row {table_row}."
    fraction = float(rows.norms_R[table_row]) / rows.median_norm if rows.median_norm > 0 else float("nan")
    if fraction >= HEALTHY_OUTPUT_FRACTION:
        return f"Its output row is healthy ({fraction:.2f} of the median norm): serving is unaffected, which is why nobody notices."
    return f"Its output row is dead too ({fraction:.2g} of the median norm): dead on both sides."


def _reserved_finding(case: RowCase, reserved: Sequence[TokenExposure], looked_for: str) -> Finding:
    table = case.inputs.rows.table
    what = counted(
        len(reserved), "reserved special token has an input row that is", "reserved special tokens have input rows that are"
    )
    names = ", ".join(printable(e.token) for e in reserved[:5]) + (", ..." if len(reserved) > 5 else "")
    ids = [e.table_row for e in reserved]
    return Finding(
        message=f"{what} {looked_for} ({names}; table rows {_rows_text(ids)}). Harmless while nothing uses them; initialise a row "
        "before you use its token as a marker.",
        where=Where(file=table.tensor.file, tensor=table.tensor.name, table_row=ids[0]),
        measured=Quantity(value=len(reserved), unit="table rows"),
        severity=Severity.NOTE,
        remedy=REMEDY,
    )


def _bounded(case: RowCase, findings: list[Finding]) -> list[Finding]:
    if len(findings) <= MAX_LISTED:
        return findings
    rest = findings[MAX_LISTED:]
    table = case.inputs.rows.table
    table_rows = sorted(f.where.table_row for f in rest if f.where.table_row is not None)
    more = Finding(
        message=f"{len(rest)} further tokens are in the same state; table rows {_rows_text(table_rows)}.",
        where=Where(file=table.tensor.file, tensor=table.tensor.name),
        measured=Quantity(value=len(rest), unit="table rows"),
        severity=rest[0].severity,
        basis=rest[0].basis,
        remedy=REMEDY,
    )
    return [*findings[:MAX_LISTED], more]


def _rows_text(table_rows: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(str(i) for i in table_rows[:most])
    return f"{shown}, ..." if len(table_rows) > most else shown


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
