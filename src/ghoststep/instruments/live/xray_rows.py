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
    is_hard_N: bool, the row has one entry only.
    """

    weight_N: torch.Tensor
    label_N: torch.Tensor
    top_N: torch.Tensor
    runner_up_N: torch.Tensor
    even_N: torch.Tensor
    masked_mass_N: torch.Tensor
    num_masked_N: torch.Tensor
    finite_N: torch.Tensor
    is_hard_N: torch.Tensor


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
    # Written into one tensor: many small results between large temporaries would fragment the heap by the rows' own size.
    found_NK = torch.zeros(rows_NV.shape[0], matrix.shape[1], dtype=torch.float64, device=rows_NV.device)
    start = 0
    for piece in chunks(rows_NV, dtype):
        product = piece @ matrix
        if not bool(product.isfinite().all()):
            product = piece.nan_to_num(0.0, 0.0, 0.0) @ matrix
        found_NK[start : start + len(piece)] = product
        start += len(piece)
    return found_NK.cpu()


def sketch_of(found: Targets, pull_NV: torch.Tensor) -> torch.Tensor:
    """The sketch of the rows that `found` was read from: a row with one entry is known, only the others are multiplied."""
    matrix_VK = sketch_matrix(pull_NV.shape[1], pull_NV.device)
    result_NK = -found.weight_N[:, None] * matrix_VK.cpu()[found.label_N.clamp_min(0)]
    others = (~found.is_hard_N).nonzero().flatten()
    if others.numel() == len(result_NK):
        return sketch(pull_NV, matrix_VK)
    if others.numel():
        result_NK[others] = sketch(pull_NV[others.to(pull_NV.device)], matrix_VK)
    return result_NK


def signature(rows_NV: torch.Tensor) -> torch.Tensor:
    """Two numbers a row, float64 [N, 2] on the CPU: enough to see whether two rows are the same one up to a factor."""
    return sketch(rows_NV, sketch_matrix(rows_NV.shape[1], rows_NV.device)[:, :2])


def targets(pull_NV: torch.Tensor, log_probability_NV: torch.Tensor | None) -> Targets:
    """Read d loss / d log p = -weight * target, one row a position. `log_probability_NV` shows which classes are masked."""
    import torch

    num, device = pull_NV.shape[0], pull_NV.device
    kinds = (
        torch.float64,
        torch.int64,
        torch.float64,
        torch.float64,
        torch.bool,
        torch.float64,
        torch.int64,
        torch.bool,
        torch.bool,
    )
    found = [torch.zeros(num, dtype=kind, device=device) for kind in kinds]
    start = 0
    for x in chunks(pull_NV):
        logp = None if log_probability_NV is None else log_probability_NV[start : start + len(x)]
        for whole, part in zip(found, _hard_rows(x, logp), strict=True):
            whole[start : start + len(x)] = part
        start += len(x)
    w, label, top, second, even, masked, num_masked, finite, is_hard = (f.cpu() for f in found)
    largest = float(w.abs().max()) if w.numel() else 0.0
    idle = w.abs() <= 1e-12 * largest
    return Targets(
        weight_N=w.masked_fill(idle, 0.0), label_N=label.masked_fill(idle, -1), top_N=top, runner_up_N=second, even_N=even,
        masked_mass_N=masked.masked_fill(idle, 0.0), num_masked_N=num_masked, finite_N=finite,
        is_hard_N=is_hard,
    )  # fmt: skip


def _hard_rows(x: torch.Tensor, logp: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Rows with a single entry (hard labels, the usual case) in three passes over them; the others by `_read`."""
    import torch

    total = x.sum(-1).double()
    low, high = x.min(-1), x.max(-1)
    label = torch.where(total <= 0, low.indices, high.indices)
    peak = torch.where(total <= 0, low.values, high.values).double()
    other = torch.where(total <= 0, high.values, low.values).double()
    # One sign only and the largest entry is the whole sum: nothing else is left in the row.
    is_hard = ((peak - total).abs() <= 1e-6 * peak.abs()) & (other == 0)
    weight = -peak
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
        some_logp = None if logp is None else logp[slow]
        for all_rows, some in zip(found, _read(x[slow].double(), some_logp), strict=True):
            all_rows[slow] = some
    is_hard[slow] = False
    return (*found, is_hard)


def _read(x: torch.Tensor, logp: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    import torch

    finite = x.isfinite().all(-1)
    x = x.nan_to_num(0.0, 0.0, 0.0)
    weight = -x.sum(-1)
    safe = torch.where(weight == 0, 1.0, weight)[:, None]
    y = (-x).div_(safe)
    top, label = y.max(-1)
    second = y.scatter(-1, label[:, None], -torch.inf).max(-1).values
    # A finite "minus infinity" (-1e4, finfo.min) masks as well: its probability is exactly 0 in float32.
    gone = torch.zeros_like(y, dtype=torch.bool) if logp is None else logp <= MASKED_BELOW
    smallest = y.min(-1).values
    if bool(gone.any()):
        smallest = torch.maximum(smallest, y.masked_fill(gone, torch.inf).min(-1).values)
    even = (second - smallest).abs() <= 1e-3 * second.abs() + 1e-9
    return weight, label, top, second, even, (y * gone).sum(-1), gone.sum(-1), finite


def is_tie(found: Targets) -> torch.Tensor:
    """bool [N]: two classes share the largest target mass, so that no single label exists."""
    return ((found.top_N - found.runner_up_N) <= _ALMOST) & (found.weight_N != 0)
