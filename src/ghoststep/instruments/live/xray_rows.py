"""Reducing gradient rows [N, V] to a few numbers a row, in chunks, so that nothing of their size is kept.

N rows, V classes, K sketch columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CHUNK_ELEMENTS = 1 << 22
SKETCH_COLUMNS = 16
MASKED_BELOW = -104.0
"""exp of it is 0 in float32: a class with such a log-probability takes no part."""
_ALMOST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What each row is trained towards. All [N], on the CPU, float64 unless said.

    weight_N: signed; 0 where the row carries no loss. label_N: int64 class with the largest target mass, -1 where no weight.
    top_N: that mass. runner_up_N: the next largest. even_N: bool, all classes but the label share the rest evenly.
    masked_mass_N: target mass on classes without probability. num_masked_N: int64 number of them. finite_N: bool.
    """

    weight_N: torch.Tensor
    label_N: torch.Tensor
    top_N: torch.Tensor
    runner_up_N: torch.Tensor
    even_N: torch.Tensor
    masked_mass_N: torch.Tensor
    num_masked_N: torch.Tensor
    finite_N: torch.Tensor


def sketch_matrix(num_classes: int, device: torch.device) -> torch.Tensor:
    """Fixed random directions float64 [V, K]: differences of rows keep their length in them to about 1/sqrt(2K)."""
    import torch

    generator = torch.Generator().manual_seed(20)
    matrix_VK = torch.randn(num_classes, SKETCH_COLUMNS, generator=generator, dtype=torch.float64)
    return (matrix_VK / math.sqrt(SKETCH_COLUMNS)).to(device)


def chunks(rows_NV: torch.Tensor, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
    """Consecutive pieces of the rows, each of bounded size, in `dtype` if one is given."""
    step = max(1, CHUNK_ELEMENTS // max(1, rows_NV.shape[-1]))
    for start in range(0, rows_NV.shape[0], step):
        piece = rows_NV[start : start + step]
        yield piece if dtype is None else piece.to(dtype)


def sketch(rows_NV: torch.Tensor, matrix_VK: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
    """rows @ matrix, float64 [N, K] on the CPU; non-finite entries count as 0. `exact` multiplies in float64, five times slower."""
    import torch

    dtype = torch.float64 if exact or rows_NV.dtype == torch.float64 else torch.float32
    matrix = matrix_VK.to(dtype)
    parts = []
    for piece in chunks(rows_NV, dtype):
        product = piece @ matrix
        if not bool(product.isfinite().all()):
            product = piece.nan_to_num(0.0, 0.0, 0.0) @ matrix
        parts.append(product.double().cpu())
    return torch.cat(parts) if parts else torch.zeros(0, matrix_VK.shape[1], dtype=torch.float64)


def targets(pull_NV: torch.Tensor, log_probability_NV: torch.Tensor | None) -> Targets:
    """Read d loss / d log p = -weight * target, one row a position. `log_probability_NV` shows which classes are masked."""
    import torch

    parts: list[tuple[torch.Tensor, ...]] = []
    start = 0
    for x in chunks(pull_NV):
        logp = None if log_probability_NV is None else log_probability_NV[start : start + len(x)]
        parts.append(_hard_rows(x, logp))
        start += len(x)
    if not parts:
        none = torch.zeros(0, dtype=torch.float64)
        parts = [(none, none.long(), none, none, none.bool(), none, none.long(), none.bool())]
    w, label, top, second, even, masked, num, finite = (torch.cat(p).cpu() for p in zip(*parts, strict=True))
    largest = float(w.abs().max()) if w.numel() else 0.0
    idle = w.abs() <= 1e-12 * largest
    return Targets(
        weight_N=w.masked_fill(idle, 0.0), label_N=label.masked_fill(idle, -1), top_N=top, runner_up_N=second, even_N=even,
        masked_mass_N=masked.masked_fill(idle, 0.0), num_masked_N=num, finite_N=finite,
    )  # fmt: skip


def _hard_rows(x: torch.Tensor, logp: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Rows with a single entry (hard labels, the usual case) in three passes over them; the others by `_read`."""
    import torch

    weight = -x.sum(-1, dtype=torch.float64)
    low, high = x.min(-1), x.max(-1)
    label = torch.where(weight >= 0, low.indices, high.indices)
    peak = torch.where(weight >= 0, low.values, high.values).double()
    other = torch.where(weight >= 0, high.values, low.values).double()
    # One sign only and the largest entry is the whole sum: nothing else is left in the row.
    is_hard = ((peak + weight).abs() <= 1e-7 * weight.abs()) & (other == 0)
    finite = weight.isfinite()
    zero = torch.zeros_like(weight)
    found = [
        weight,
        label,
        torch.ones_like(weight),
        zero,
        torch.ones_like(finite),
        zero.clone(),
        torch.zeros_like(label),
        finite,
    ]
    masked = zero.bool() if logp is None else logp.amin(-1) <= MASKED_BELOW
    slow = (~is_hard | masked | ~finite).nonzero().flatten()
    if slow.numel():
        for all_rows, some in zip(found, _read(x[slow].double(), None if logp is None else logp[slow]), strict=True):
            all_rows[slow] = some
    return tuple(found)


def _read(x: torch.Tensor, logp: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    import torch

    finite = x.isfinite().all(-1)
    x = x.nan_to_num(0.0, 0.0, 0.0)
    weight = -x.sum(-1)
    safe = torch.where(weight == 0, 1.0, weight)[:, None]
    y = (-x).div_(safe)
    top, label = y.max(-1)
    second = y.scatter(-1, label[:, None], -torch.inf).max(-1).values
    if logp is None:
        gone = torch.zeros_like(y, dtype=torch.bool)
    else:
        # A finite "minus infinity" (-1e4, finfo.min) masks as well: its probability is exactly 0 in float32.
        gone = logp <= MASKED_BELOW
    smallest = y.min(-1).values
    if bool(gone.any()):
        smallest = torch.maximum(smallest, y.masked_fill(gone, torch.inf).min(-1).values)
    even = (second - smallest).abs() <= 1e-3 * second.abs() + 1e-9
    return weight, label, top, second, even, (y * gone).sum(-1), gone.sum(-1), finite


def is_tie(found: Targets) -> torch.Tensor:
    """bool [N]: two classes share the largest target mass, so that no single label exists."""
    return ((found.top_N - found.runner_up_N) <= _ALMOST) & (found.weight_N != 0)
