"""From measured norms to factors: what every gradient of one step is multiplied by. Nothing here is read by the host."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.remedies.clip_gradients import Measured
from ghoststep.remedies.clip_rule import find_spike

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """R table rows; the rest 0-dim. float64 and bool.

    row_factor_R: in (0, 1]. removed_R: rows with non-finite values. table_factor and trunk_factor: one more factor for every
    table and every other tensor. norm, trunk_norm: before clipping, of what is kept. is_bad: non-finite values outside the
    tables, or nothing finite left inside. trunk_spikes: few tensors outside the tables hold the step, as spiking rows would.
    engages: False if torch's own clip loses nothing here that another could save.
    """

    row_norms_R: torch.Tensor
    row_factor_R: torch.Tensor
    removed_R: torch.Tensor
    spiking_R: torch.Tensor
    cap: torch.Tensor
    table_factor: torch.Tensor
    trunk_factor: torch.Tensor
    norm: torch.Tensor
    trunk_norm: torch.Tensor
    is_bad: torch.Tensor
    trunk_spikes: torch.Tensor
    engages: torch.Tensor


def plan_clip(measured: Measured, torch_norm: torch.Tensor, max_norm: float, mode: str) -> Plan:
    """torch_norm: the norm as torch computes it, possibly not finite."""
    import torch

    scale = measured.scale
    removed_R = measured.row_norms_R.isfinite().logical_not()
    kept_R = torch.where(removed_R, 0.0, measured.row_norms_R)
    trunk_norm = measured.trunk_squares.sum().sqrt() * scale
    tables_norm = _norm(kept_R, scale)
    norm = _norm(torch.stack([tables_norm, trunk_norm]), scale)
    is_bad = trunk_norm.isfinite().logical_not() | (removed_R.any() & (norm == 0))
    bound = 1.0 if math.isinf(max_norm) else max_norm  # nothing is clipped then, and what spikes is still named
    spike = find_spike(kept_R, torch.where(is_bad, 0.0, trunk_norm), bound)
    row_factor_R = torch.ones_like(kept_R)
    if mode == "row" and not math.isinf(max_norm):
        row_factor_R = torch.where(spike.spiking_R, spike.cap / kept_R, 1.0)
    capped_norm = _norm(torch.where(spike.spiking_R, spike.cap, kept_R), scale)
    trunk_T = torch.where(is_bad, 0.0, measured.trunk_squares.sqrt() * scale)
    trunk_spike = find_spike(trunk_T, capped_norm, bound)
    if mode == "group":
        table_factor, trunk_factor = _factor(tables_norm, max_norm), _factor(trunk_norm, max_norm)
    else:
        left = _norm(torch.stack([_norm(kept_R * row_factor_R, scale), trunk_norm]), scale)
        table_factor = trunk_factor = _factor(left, max_norm)
    never = mode == "global" or math.isinf(max_norm)
    spikes = torch.zeros_like(is_bad) if never else spike.num_spiking > 0
    return Plan(
        row_norms_R=measured.row_norms_R, row_factor_R=row_factor_R, removed_R=removed_R, spiking_R=spike.spiking_R,
        cap=spike.cap, table_factor=table_factor, trunk_factor=trunk_factor, norm=norm, trunk_norm=trunk_norm, is_bad=is_bad,
        trunk_spikes=trunk_spike.num_spiking > 0, engages=spikes | _loses_all(torch_norm, max_norm).to(is_bad.device),
    )  # fmt: skip


def _loses_all(torch_norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """True if torch's coefficient is NaN, or 0 because the norm overflowed or max_norm / norm underflowed."""
    return ((max_norm / (torch_norm + 1e-6) > 0) & torch_norm.isfinite()).logical_not()


def _norm(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values / scale).square().sum().sqrt() * scale


def _factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """torch's clip coefficient, in float64."""
    import torch

    if math.isinf(max_norm):
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp_max(1.0)
