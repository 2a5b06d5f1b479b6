"""The outcome of an engaged step as one small tensor, so that an accelerator's step is told one call later, without a wait."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.remedies.clip_events import MAX_ROWS, ClipAction, ClipEvent, SpikingRow, tell
from ghoststep.remedies.clip_plan import Plan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """values: float64 [8 + 2 K], K = `MAX_ROWS` or fewer: what `pack` put there. table_sizes: rows of each table, in order."""

    values: torch.Tensor
    copied: Any  # a device event, or None where the values are already on the host
    mode: str
    max_norm: float
    table_names: Sequence[str]
    table_sizes: Sequence[int]
    trunk_names: Sequence[str]
    row_ids: Sequence[torch.Tensor | None]  # of a sparse gradient's stored rows; None: a row's number is its index


_waiting: list[Outcome] = []


def pack(plan: Plan, trunk_squares: torch.Tensor) -> torch.Tensor:
    """engages, is bad, trunk spikes, norm, trunk norm, cap, hit rows, worst trunk tensor; then the hit rows and their norms."""
    import torch

    hit_R = plan.spiking_R | plan.removed_R
    key_R = torch.where(plan.removed_R, torch.inf, torch.where(hit_R, plan.row_norms_R, -1.0))
    rows = key_R.topk(min(MAX_ROWS, len(key_R))).indices
    worst = trunk_squares.nan_to_num(torch.inf, torch.inf).argmax() if len(trunk_squares) else plan.norm.new_zeros(())
    fixed = (plan.engages, plan.is_bad, plan.trunk_spikes, plan.norm, plan.trunk_norm, plan.cap, hit_R.sum(), worst)
    return torch.cat([torch.stack([f.double() for f in fixed]), rows.double(), plan.row_norms_R.index_select(0, rows)])


def tell_now(outcome: Outcome) -> None:
    """Turn the values into an event, if the step engaged."""
    engages, is_bad, trunk_spikes, norm, trunk_norm, cap, num_hit, worst, *rest = outcome.values.tolist()
    if not (engages or trunk_spikes):
        return
    count = len(rest) // 2
    rows = [_named(int(i), n, outcome) for i, n in zip(rest[:count], rest[count:], strict=True)][: int(num_hit)]
    removed = any(r.norm != r.norm or r.norm in (float("inf"),) for r in rows)
    huge = is_bad or trunk_spikes or not num_hit
    action = _action(outcome.mode, bool(is_bad), removed, int(num_hit)) if engages else ClipAction.AS_TORCH
    if math.isinf(outcome.max_norm) and action not in (ClipAction.SKIPPED, ClipAction.REMOVED_ROWS):
        action = ClipAction.MEASURED
    tell(
        ClipEvent(
            action=action, mode=outcome.mode, max_norm=outcome.max_norm, norm=norm, trunk_norm=trunk_norm, cap=cap,
            rows=tuple(rows), num_rows=int(num_hit),
            worst_trunk=outcome.trunk_names[int(worst)] if huge and outcome.trunk_names else "",
        )
    )  # fmt: skip


def tell_later(outcome: Outcome) -> None:
    """Keep the outcome until its copy to the host has arrived; the next call tells it."""
    _waiting.append(outcome)
    del _waiting[:-64]  # nobody called again for long: bounded


def tell_waiting() -> None:
    """Tell what has arrived meanwhile, in order; never waits."""
    while _waiting and (_waiting[0].copied is None or _waiting[0].copied.query()):
        tell_now(_waiting.pop(0))


def to_host(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy that does not wait, and the device event that says when it has arrived (None: it has)."""
    import torch

    if values.device.type == "cpu":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.device.type == "cuda")
    host.copy_(values, non_blocking=True)
    event = torch.get_device_module(values.device).Event()
    with contextlib.suppress(AttributeError):
        event.record()
    return host, event


def _action(mode: str, is_bad: bool, removed: bool, num_hit: int) -> ClipAction:
    if is_bad:
        return ClipAction.SKIPPED
    if removed:
        return ClipAction.REMOVED_ROWS
    if mode == "group":
        return ClipAction.GROUPS_APART
    return ClipAction.CAPPED_ROWS if mode == "row" and num_hit else ClipAction.RESCALED


def _named(index: int, norm: float, outcome: Outcome) -> SpikingRow:
    for name, size, ids in zip(outcome.table_names, outcome.table_sizes, outcome.row_ids, strict=True):
        if index < size:
            return SpikingRow(table=name, table_row=index if ids is None else int(ids[index]), norm=norm)
        index -= size
    raise AssertionError("a row beyond all tables")  # the sizes are those of the vector that was searched
