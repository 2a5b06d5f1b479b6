"""The gradients of one step as the clip sees them: dense, sparse, sharded; measured without overflow, scaled without underflow.

R table rows of all tables together, in the order of the tables. Norms and squares are float64.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BLOCK_ELEMENTS = 1 << 20
"""Elements widened to float64 at a time (8 MiB), so that a spike step needs no copy of a table."""


SURE_NORM = 1e-15
"""Norm down to which float32 squares lose nothing; below, they vanish little by little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """tables: gradients of embedding tables ([rows, D], dense, DTensor or coalesced sparse). trunk: all others.
    table_names and trunk_names run along with them."""

    tables: Sequence[torch.Tensor]
    trunk: Sequence[torch.Tensor]
    table_names: Sequence[str]
    trunk_names: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """row_norms_R: norm of each table row, non-finite ones as they are. trunk_squares: squared norm of each trunk tensor, over
    the square of `scale`, the largest magnitude (1 unless a gradient is float64)."""

    row_norms_R: torch.Tensor
    trunk_squares: torch.Tensor
    scale: torch.Tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor. Whoever has one has imported its module (40 MB that nobody else should load)."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The values that this rank holds, as a view: a DTensor's shard, a coalesced sparse tensor's rows, or the tensor itself.
    Complex values as pairs of reals."""
    import torch

    if is_sharded(tensor):
        shard: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        tensor = shard.wait() if hasattr(shard, "wait") else shard
    elif tensor.is_sparse:
        tensor = tensor._values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """In float64; on the host where the device has none (MPS)."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's value on every rank (a collective), any other tensor as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def measure(gradients: Gradients, device: torch.device, *, host_reads: bool) -> Measured:
    """Row norms of the tables and squared norms of the trunk's tensors; collective if anything is sharded.

    host_reads: True measures in float32 first and repeats in float64 only what is not finite or tiny (a float64 norm costs ten times
    a float32 one on a CPU); False measures in float64 at once, without a read by the host.
    """
    import torch

    scale = _scale([*gradients.tables, *gradients.trunk], device)
    rows = [_row_norms(g, scale, host_reads=host_reads).to(device) for g in gradients.tables]
    row_norms_R = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64, device=device)
    return Measured(
        row_norms_R=row_norms_R, trunk_squares=_squares(gradients.trunk, scale, device, host_reads=host_reads), scale=scale
    )


def _scale(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """1 where float64 squares cannot overflow; else the largest finite magnitude (float64 gradients reach 1e308)."""
    import torch

    one = torch.ones((), dtype=torch.float64, device=device)
    if not any(is_wide(g) for g in gradients):
        return one
    wide = [g for g in gradients if is_wide(g) and local(g).numel()]
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for g in wide:
        magnitude = local(g).abs()
        largest = torch.maximum(largest, torch.where(magnitude.isfinite(), magnitude, 0.0).max().to(device))
    for g in gradients:
        largest = _agree(largest, g)
    return torch.where(largest > 0, largest, one)


def is_wide(tensor: torch.Tensor) -> bool:
    """float64, or complex numbers made of it."""
    import torch

    return tensor.dtype in (torch.float64, torch.complex128)


def _split(placement: Any) -> int | None:
    """The dimension that a placement splits, also along with another (FSDP over tensor parallelism), or None."""
    dim = getattr(placement, "dim", None)
    return dim if isinstance(dim, int) else None


def _agree(largest: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The maximum over the ranks that hold shards of `like`."""
    if not is_sharded(like):
        return largest
    from torch.distributed.tensor import DTensor, Partial

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(largest, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()


def _row_norms(gradient: torch.Tensor, scale: torch.Tensor, *, host_reads: bool) -> torch.Tensor:
    """[rows] of one table on every rank. Squares are what is summed over ranks, so a table sharded along D is right too."""
    values = _by_rows(gradient)
    if not is_sharded(gradient):
        return _local_norms(values, scale, host_reads=host_reads) * scale
    from torch.distributed.tensor import DTensor, Partial

    squares = _local_norms(values, scale, host_reads=host_reads).square()
    mesh, old = gradient.device_mesh, gradient.placements  # type: ignore[attr-defined]
    new = [Partial("sum") if (_split(p) or 0) > 0 else p for p in old]
    shape = gradient.shape[:1]
    made = DTensor.from_local(squares, mesh, new, run_check=False, shape=shape, stride=(1,))
    return made.full_tensor().sqrt() * scale


def _local_norms(values_RD: torch.Tensor, scale: torch.Tensor, *, host_reads: bool) -> torch.Tensor:
    """Norms of rows over `scale`, float64."""
    import torch

    if not host_reads:
        if values_RD.dtype == torch.float64:
            values_RD = values_RD / scale.to(values_RD.device)
        wide_R: torch.Tensor = torch.linalg.vector_norm(values_RD, dim=1, dtype=torch.float64)
        return wide_R
    if values_RD.dtype == torch.float64:
        return _blockwise(values_RD, scale)
    norms_R = widened(torch.linalg.vector_norm(values_RD, dim=1, dtype=torch.float32))
    step = max(BLOCK_ELEMENTS // max(values_RD.shape[1], 1), 1)
    any_R = torch.cat([part.any(dim=1) for part in torch.split(values_RD, step)])  # `any` copies what it is given as bool
    unsure_R = ~norms_R.isfinite() | ((norms_R < SURE_NORM) & any_R.to(norms_R.device))
    again_R = unsure_R.nonzero().flatten()
    if len(again_R):
        norms_R[again_R] = _blockwise(values_RD, scale, again_R.to(values_RD.device))
    return norms_R


def _blockwise(values_RD: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """float64 norms over `scale` of all rows or of those named, a block at a time."""
    import torch

    count, width = len(values_RD) if rows is None else len(rows), max(values_RD.shape[1], 1)
    step = max(BLOCK_ELEMENTS // width, 1)
    parts = []
    for start in range(0, count, step):
        block = values_RD[start : start + step] if rows is None else values_RD[rows[start : start + step]]
        wide = widened(block)
        parts.append(torch.linalg.vector_norm(wide / scale.to(wide.device), dim=1))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=scale.device)


def _squares(trunk: Sequence[torch.Tensor], scale: torch.Tensor, device: torch.device, *, host_reads: bool) -> torch.Tensor:
    """[tensors] squared norms over the square of `scale`, summed over the ranks that hold shards."""
    import torch

    if not trunk:
        return torch.zeros(0, dtype=torch.float64, device=device)
    squares = [_square(local(g), scale, host_reads=host_reads).to(scale.device) for g in trunk]
    groups: dict[Any, list[int]] = {}
    for index, g in enumerate(trunk):
        if is_sharded(g):
            sharded = tuple(_split(p) is not None for p in g.placements)  # type: ignore[attr-defined]
            groups.setdefault((g.device_mesh, sharded), []).append(index)  # type: ignore[attr-defined]
    for (mesh, sharded), indices in groups.items():
        from torch.distributed.tensor import DTensor, Partial, Replicate

        placements = [Partial("sum") if s else Replicate() for s in sharded]
        together = torch.stack([squares[i] for i in indices])
        for index, square in zip(
            indices, DTensor.from_local(together, mesh, placements, run_check=False).full_tensor(), strict=True
        ):
            squares[index] = square
    return torch.stack(squares)


def _square(values: torch.Tensor, scale: torch.Tensor, *, host_reads: bool) -> torch.Tensor:
    import torch

    if is_wide(values) or not host_reads:
        wide = values / scale.to(values.device) if is_wide(values) else values
        square: torch.Tensor = torch.linalg.vector_norm(wide, dtype=torch.float64).square()
        return square
    norm = widened(torch.linalg.vector_norm(values, dtype=torch.float32))
    if not bool(norm.isfinite()):
        norm = torch.linalg.vector_norm(_blockwise(values.flatten(1) if values.ndim > 1 else values.reshape(1, -1), scale))
    return norm.square()


def num_rows(gradient: torch.Tensor) -> int:
    """Table rows that this gradient speaks of: all of a dense or sharded one, the stored ones of a sparse one."""
    return len(gradient._values()) if gradient.is_sparse else gradient.shape[0]


def rows_of(gradient: torch.Tensor, per_row_R: torch.Tensor) -> torch.Tensor:
    """This rank's part of a vector over a table's rows (a local slice, no collective)."""
    if not is_sharded(gradient):
        return per_row_R
    from torch.distributed.tensor import DTensor, Replicate

    mesh, old = gradient.device_mesh, gradient.placements  # type: ignore[attr-defined]
    new = [p if _split(p) == 0 else Replicate() for p in old]
    whole_R = DTensor.from_local(per_row_R, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole_R.redistribute(placements=new).to_local()


def _by_rows(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's rows as a view [rows, everything else]."""
    values = local(gradient)
    return values.view(len(values), math.prod(values.shape[1:]))


def scale_rows(gradient: torch.Tensor, factor_R: torch.Tensor, removed_R: torch.Tensor) -> None:
    """Multiply rows in place by factors in (0, 1] and set removed rows to 0. Rows with factor 1 keep their bits. Read by the host."""
    values = _by_rows(gradient)
    factor_R, removed_R = rows_of(gradient, factor_R).to(values.device), rows_of(gradient, removed_R).to(values.device)
    hit = ((factor_R != 1) & ~removed_R).nonzero().flatten()
    step = max(BLOCK_ELEMENTS // max(values.shape[1], 1), 1)
    for start in range(0, len(hit), step):
        rows = hit[start : start + step]
        wide = widened(values[rows])
        wide *= factor_R[rows, None].to(wide.device)
        values[rows] = wide.to(values.dtype).to(values.device)
    values[removed_R.nonzero().flatten()] = 0


def scale_all(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply every gradient in place by a 0-dim factor in (0, 1], read by the host.

    A factor near the smallest normal number of float32 would be imprecise, or zero where subnormal numbers are flushed: its
    root is multiplied twice. float16 takes the factor in float32 for the same reason.
    """
    import torch

    value = float(factor)
    parts = [value] if value > 1e-30 else [math.sqrt(value)] * 2
    for g in gradients:
        values = local(g)
        for part in parts:
            if values.dtype in (torch.float16, torch.bfloat16):  # a 0-dim factor would be rounded to the gradient's type
                values.mul_(torch.full((1,) * values.ndim, part, dtype=torch.float32, device=values.device))
            else:
                values.mul_(part)


def scale_on_device(gradients: Sequence[torch.Tensor], factors: Sequence[torch.Tensor], zeroed: Sequence[torch.Tensor]) -> None:
    """Multiply in place and zero where asked, nothing read by the host: one pass each.

    factors: float64 for each gradient, 0-dim or [its rows]; the product is formed in float64 and rounded once, so that a
    factor that is a float32 number gives the bits of a float32 product. zeroed: bool, alike.
    """
    for g, factor, zero in zip(gradients, factors, zeroed, strict=True):
        values = _by_rows(g) if factor.ndim else local(g)
        if factor.ndim:
            factor, zero = rows_of(g, factor).unsqueeze(1), rows_of(g, zero).unsqueeze(1)  # noqa: PLW2901
        else:
            factor = factor.reshape((1,) * values.ndim)  # noqa: PLW2901  a 0-dim factor would be rounded to the gradient's type
        values.mul_(factor.to(values.device)).masked_fill_(zero.to(values.device), 0)
