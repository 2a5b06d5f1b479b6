"""Which input rows of a checkpoint to repair, and with what: planned here, written by `rows_write`, proved by `rows_proof`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import SubjectError, UsageError
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, StoredTensors, Tables
from ghoststep.evidence.plan import TrainingPlan
from ghoststep.evidence.rows import InputRows
from ghoststep.evidence.tokenizer import SuspectReach, TemplateTokens, Vocabulary
from ghoststep.evidence.wiring import MixingClass, Tie, TieState
from ghoststep.finding import Severity
from ghoststep.severity import SPIKE_NORM, Exposure, amplifies, exposures, padding_ids, row_severity

if TYPE_CHECKING:
    import torch

    from ghoststep.subjects.checkpoint import Checkpoint

TARGET_SHARE = 0.1
"""Norm of a repaired row over the median norm. Large enough that no step is lost (0 against 504 of 504 trigger steps, measured by
`benchmarks/lost_steps.py`), small enough to say little before it is trained."""

_DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """One row to write. raw: its bytes in the stored dtype. why: what feeds the token, in words."""

    table_row: int
    token: str
    old_norm: float
    new_norm: float
    why: str
    raw: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRepair:
    """What would be written. left: near-zero rows that stay as they are, with the reason; both ascending by table row."""

    file: str
    tensor: str
    dtype: str
    num_rows: int
    num_dims: int
    median_norm: float
    target_norm: float
    seed: int
    rows: tuple[NewRow, ...]
    left: tuple[tuple[int, str], ...]


def plan_repair(
    checkpoint: Checkpoint, *, rows: Sequence[int] = (), base: Checkpoint | None = None, seed: int = 0
) -> RowRepair:
    """Choose the near-zero and zero rows of the input table to repair, and draw their new values.

    Without `rows`: every row under 1e-6 whose token training can feed and that can amplify in this wiring. With `rows`: exactly
    these, which must be under 1e-6 too. With `base`: rows that differ from the base are left alone. A new row is a random
    direction (seeded by `seed` and the row's number) of a tenth of the median norm, rounded to the stored dtype.

    Raises `UsageError` for rows that cannot be asked for, and `SubjectError` where there is something to repair and it cannot be
    done safely: another format than safetensors, a quantised table, a tied table (its rows get a gradient in every step, and are
    output rows too).
    """
    from ghoststep.engine import Case
    from ghoststep.registry import load

    case = Case([checkpoint, TrainingPlan()], load().instruments)
    tables, inputs = _needed(case, Tables, checkpoint), _needed(case, InputRows, checkpoint)
    stored = _needed(case, StoredTensors, checkpoint)
    facts = inputs.rows
    effective_R = facts.norms_R * inputs.multiplier
    suspects = [int(i) for i in (effective_R < SPIKE_NORM).nonzero()[0]]
    chosen, left = _choose(case, suspects, named=_asked(rows, effective_R) if rows else {})
    if chosen:
        _refuse(checkpoint, stored, tables, case.fact(TieState))
    store = checkpoint.rows(tables.input.tensor.name)
    if chosen and base is not None:
        for table_row in _differing(store, base, tables.input.tensor.name, sorted(chosen)):
            left[table_row] = "differs from the base"
            del chosen[table_row]
    target = TARGET_SHARE * facts.median_norm
    tokens = _tokens(case)
    new = []
    for table_row, why in sorted(chosen.items()):
        raw, norm = _draw(table_row, target, store.num_dims, store.info.dtype, seed)
        new.append(
            NewRow(
                table_row=table_row, token=tokens.get(table_row, ""), old_norm=float(facts.norms_R[table_row]), new_norm=norm,
                why=why, raw=raw,
            )
        )  # fmt: skip
    info = tables.input.tensor
    return RowRepair(
        file=info.file, tensor=info.name, dtype=info.dtype, num_rows=tables.input.num_rows, num_dims=tables.input.num_dims,
        median_norm=facts.median_norm, target_norm=target, seed=seed, rows=tuple(new), left=tuple(sorted(left.items())),
    )  # fmt: skip


def _needed(case: Any, kind: type, checkpoint: Checkpoint) -> Any:
    fact = case.fact(kind)
    if isinstance(fact, Missing):
        raise SubjectError(f"{checkpoint.name}: its input table cannot be judged: {fact.reason}")
    return fact


def _refuse(checkpoint: Checkpoint, stored: StoredTensors, tables: Tables, tie: object) -> None:
    where = checkpoint.name
    if stored.format != "safetensors":
        raise SubjectError(
            f"{where} is {stored.format}; rows are rewritten in place of bytes, which is done for safetensors only. Save the model "
            "with `save_pretrained(folder, safe_serialization=True)` first."
        )
    if stored.base_model is not None:
        raise SubjectError(f"{where} is an adapter; repair the model it belongs to ({stored.base_model or 'its base'})")
    table = tables.input
    if table.tensor.dtype not in _DTYPES or table.unreadable:
        raise SubjectError(f"{where}: the input table is stored as {table.tensor.dtype}; expected one of {', '.join(_DTYPES)}. "
                           "Repair the unquantised checkpoint.")  # fmt: skip
    if not isinstance(tie, TieState):
        raise SubjectError(
            f"{where}: whether input and output share a table is unknown, so it cannot be proved that logits stay"
        )
    if tie.tie in (Tie.TIED, Tie.DRIFTING, Tie.BROKEN_HEAD_MISSING):
        raise SubjectError(
            f"{where}: input and output are one table ({tie.reason}). A new row would change that token's logit everywhere, and is "
            "not needed: the softmax gives every row of a tied table a gradient in every step."
        )


def _choose(case: Any, suspects: Sequence[int], *, named: dict[int, str]) -> tuple[dict[int, str], dict[int, str]]:
    """Rows to repair and rows to leave, each with why. Where rows are named, the other dangers are left and said to be."""
    reach, mixing = case.fact(SuspectReach), case.fact(MixingClass)
    template, vocabulary, declared = case.fact(TemplateTokens), case.fact(Vocabulary), case.fact(Declared)
    if isinstance(reach, Missing):
        if suspects and not named:
            raise SubjectError(
                f"{len(suspects)} rows are near zero, and which of them text can produce is unknown ({reach.reason}). Name them: "
                f"--rows {','.join(map(str, suspects[:8]))}{',...' if len(suspects) > 8 else ''}"
            )
        return named, dict.fromkeys(sorted(set(suspects) - set(named)), "not asked for")
    exposed = exposures(reach, template, vocabulary, declared)
    padding = padding_ids(vocabulary, declared)
    chosen: dict[int, str] = {}
    left: dict[int, str] = {}
    for table_row in suspects:
        exposure = exposed.get(table_row)
        if exposure is None:
            left[table_row] = "no token has this id"
        elif table_row in padding:
            left[table_row] = "padding: kept at zero on purpose"
        elif exposure.exposure is Exposure.NONE:
            left[table_row] = Exposure.NONE.value
        elif exposure.exposure is Exposure.RESERVED:
            chosen[table_row] = exposure.exposure.value
        elif not amplifies(mixing, exposure):
            left[table_row] = "does not amplify in this wiring"
        else:
            severity = row_severity(exposure, mixing, case.fact(TrainingPlan).training, zero=False)
            if severity is None or severity.rank >= Severity.WARNING.rank:
                chosen[table_row] = exposure.exposure.value
            else:
                left[table_row] = "harmless in this wiring"
    if not named:
        return chosen, left
    other = {i: f"a danger that was not asked for ({why})" for i, why in chosen.items() if i not in named}
    return named, {**{i: why for i, why in left.items() if i not in named}, **other}


def _asked(rows: Sequence[int], effective_R: Any) -> dict[int, str]:
    beyond = [i for i in rows if not 0 <= i < len(effective_R)]
    if beyond:
        raise UsageError(f"--rows {beyond[0]}: the table has rows 0 to {len(effective_R) - 1}")
    healthy = [i for i in rows if not effective_R[i] < SPIKE_NORM]
    if healthy:
        raise UsageError(
            f"--rows {healthy[0]}: its effective norm is {effective_R[healthy[0]]:.3g}, not under {SPIKE_NORM:g}. A row that "
            "carries something is never overwritten."
        )
    return dict.fromkeys(rows, "asked for")


def _tokens(case: Any) -> dict[int, str]:
    reach = case.fact(SuspectReach)
    return dict(reach.tokens) if isinstance(reach, SuspectReach) else {}


def _differing(store: Any, base: Checkpoint, name: str, rows: Sequence[int]) -> list[int]:
    """Rows of ours that are not the base's: somebody changed them since."""
    import torch

    other = base.rows(name)
    if other.num_dims != store.num_dims:
        raise UsageError(f"{base.name}: {name} has {other.num_dims} columns, the checkpoint's {store.num_dims}: not its base")
    found = []
    for i in rows:
        if i >= other.num_rows:
            found.append(i)  # added since: not the base's
            continue
        mine, its = decode(store, i), decode(other, i).to(torch.float64)
        if not torch.equal(mine, its.to(mine.dtype)) and not torch.equal(mine.to(torch.float64), its):
            found.append(i)
    return found


def decode(store: Any, table_row: int) -> torch.Tensor:
    """One stored row in its own dtype."""
    import torch

    if store.info.dtype not in _DTYPES:
        raise SubjectError(f"{store.info.name} is stored as {store.info.dtype}; expected one of {', '.join(_DTYPES)}")
    raw = bytes(store.raw_rows(table_row, table_row + 1))
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, _DTYPES[store.info.dtype]))


def _draw(table_row: int, target: float, num_dims: int, dtype: str, seed: int) -> tuple[bytes, float]:
    """Bytes of a random row of norm `target`, and its norm once rounded; `SubjectError` where the dtype cannot hold it."""
    import torch

    generator = torch.Generator().manual_seed((seed * 1_000_003 + table_row) % 2**63)
    row = torch.randn(num_dims, generator=generator, dtype=torch.float64)
    row *= target / float(row.norm())
    stored = row.to(getattr(torch, _DTYPES[dtype]))
    norm = float(stored.double().norm())
    if not abs(norm - target) <= 0.05 * target:
        raise SubjectError(
            f"{dtype} cannot hold a row of norm {target:.3g} (it becomes {norm:.3g}): the table's values are too small"
        )
    return bytes(stored.view(torch.uint8).numpy().tobytes()), norm
