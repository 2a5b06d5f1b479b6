"""Which table rows of a step spike, and how far they are capped. Pure tensor arithmetic, without a read by the host.

R table rows of all tables together. Everything is float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.lost_step import LOST_COEFFICIENT, OWNED

if TYPE_CHECKING:
    import torch

ROW_FACTOR = 10.0
"""A spiking row stands at least this far above the 99th percentile of the rows below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """spiking_R: bool, rows to cap. cap: 0-dim, the norm they are capped at. num_spiking: 0-dim int64."""

    spiking_R: torch.Tensor
    cap: torch.Tensor
    num_spiking: torch.Tensor


def find_spike(norms_R: torch.Tensor, trunk_norm: torch.Tensor, max_norm: float) -> Spike:
    """The rows without which the step would not be lost, each far above what remains.

    The 99th percentile of *all* rows would be the guilty row itself in a batch of fewer than a hundred tokens, and the largest
    of two guilty rows would hide the other. So rows are judged from the largest down, each against the rows below it only. All
    rows down to the k-th are spiking if

    - the k-th stands above ``cap = max(max_norm, 10 x the 99th percentile of the rows below)``. Where no row is left below,
      the trunk's norm stands for ten of them;
    - the k-th and its kin (rows up to ten times as large) hold more than 99 % of the squared norm of what is left without the
      rows above them, and that rest would be clipped by less than 1e-3.

    The smallest such row decides, and its cap is that of all. Rows with a norm of zero (absent tokens) do not count.

    norms_R: float64, finite (non-finite rows set to 0 by the caller). Nothing is read by the host. Cost: one sort of R values.
    """
    import torch

    num_rows = len(norms_R)
    if num_rows == 0:
        zero = norms_R.new_zeros(())
        return Spike(spiking_R=norms_R.bool(), cap=zero + max_norm, num_spiking=zero.long())
    sorted_R, order_R = norms_R.sort(descending=True)
    scale = torch.maximum(norms_R.max(), trunk_norm).clamp_min(torch.finfo(torch.float64).tiny)
    cap_R = _caps(sorted_R, trunk_norm, max_norm)
    rest = _rest(sorted_R / scale, trunk_norm / scale)
    kin_R = torch.searchsorted(-sorted_R, -ROW_FACTOR * sorted_R)  # how many rows are more than ten times as large
    left_R, below_R = rest.index_select(0, kin_R), rest.narrow(0, 1, num_rows)  # without the larger rows; without the k-th too
    is_lost_R = max_norm < LOST_COEFFICIENT * scale * left_R.sqrt()
    enough_R = (sorted_R > cap_R) & (below_R < (1 - OWNED) * left_R) & is_lost_R
    index_R = torch.arange(num_rows, device=norms_R.device)
    num_spiking = torch.where(enough_R, index_R + 1, 0).max()
    spiking_R = torch.zeros_like(norms_R, dtype=torch.bool).scatter(0, order_R, index_R < num_spiking)
    cap = torch.where(num_spiking > 0, _at(cap_R, (num_spiking - 1).clamp_min(0)), max_norm)
    return Spike(spiking_R=spiking_R, cap=cap, num_spiking=num_spiking)


def _at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """values[index] for a 0-dim index; plain indexing would copy it to the host."""
    return values.index_select(0, index.reshape(1)).reshape(())


def _caps(sorted_R: torch.Tensor, trunk_norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """cap[k]: the bound for the k-th largest row if it and all larger ones are taken off."""
    import torch

    num_rows = len(sorted_R)
    num_nonzero = (sorted_R > 0).sum()
    index_R = torch.arange(num_rows, device=sorted_R.device)
    below_R = (num_nonzero - index_R - 1).clamp_min(0)  # rows with a gradient below the k-th
    percentile_R = index_R + 1 + torch.div(below_R, 100, rounding_mode="floor")
    reference_R = torch.where(
        below_R > 0, ROW_FACTOR * sorted_R.index_select(0, percentile_R.clamp_max(num_rows - 1)), trunk_norm
    )
    return reference_R.clamp_min(max_norm)


def _rest(sorted_R: torch.Tensor, trunk_norm: torch.Tensor) -> torch.Tensor:
    """[R + 1] squared norm without the k largest rows; of values at most 1, so that nothing overflows."""
    import torch

    squares = torch.cat([sorted_R.square(), trunk_norm.square().reshape(1)])
    return squares.flip(0).cumsum(0).flip(0)  # smallest first, so that small remainders are exact
