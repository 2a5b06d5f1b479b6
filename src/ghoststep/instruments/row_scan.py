"""One pass over the bytes of a table: norms, zeros, non-finite values, and a small sketch of every table row.

Shapes: R table rows, D embedding dimensions, K sketch columns (at most 16), B bytes of a stored table row. Memory beside the
store's own map: a 4 MB buffer a thread and about (4 K + 40) bytes a table row.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.instruments.row_blocks import RowDecoder
from ghoststep.numerics import safe_row_norms

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ghoststep.subjects.base import RowStore

MAX_SKETCH_COLUMNS = 16
NUM_CODE_COLUMNS = 8
CODES_PER_SPREAD = 4.0
"""Sketch codes count quarters of a column's standard deviation; one byte reaches from -32 to +32 of them."""
SAMPLE_ELEMENTS = 1 << 19
SAMPLE_ROWS = 256
_LOW_FLOAT32, _LOW_FLOAT64 = 1e-12, 1e-140
"""Below these norms squares may have been lost to underflow, so the block's table row is measured again from its bits."""
_SKETCH_ROWS = 1 << 13
_EXACT_ELEMENTS = 1 << 17  # keeps the float64 temporaries of the slow path near 10 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What an ordinary table row looks like, from at most 256 rows spread evenly over the table (no chance involved).

    sample_SD: float64, finite non-zero sampled rows without outliers (over ten times their median norm).
    median_norm: of these rows (0.0 if there are none). centre_D: their mean.
    columns_K: the sketch's columns. scale_K: 1 / standard deviation there (0 where constant).
    """

    sample_SD: NDArray[np.float64]
    median_norm: float
    centre_D: NDArray[np.float64]
    columns_K: NDArray[np.int64]
    scale_K: NDArray[np.float64]

    def pick(self, rows_RD: torch.Tensor) -> torch.Tensor:
        """The sketch's columns of some rows, as a view [R, K]."""
        step = int(self.columns_K[1] - self.columns_K[0]) if len(self.columns_K) > 1 else 1
        return rows_RD[:, ::step][:, : len(self.columns_K)]

    def standardise(self, picked_RK: torch.Tensor) -> torch.Tensor:
        """(value - mean) / standard deviation of picked columns: a new float32 tensor [R, K]."""
        import torch

        centre, scale = torch.from_numpy(self.centre_D[self.columns_K]), torch.from_numpy(self.scale_K)
        if picked_RK.dtype == torch.float32 and float(scale.max()) < 1e30 and float(centre.abs().max()) < 1e30:
            return torch.sub(picked_RK, centre.to(torch.float32)).mul_(scale.to(torch.float32))
        return torch.sub(picked_RK.to(torch.float64), centre).mul_(scale).to(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScan:
    """The measurements of the pass. keys_R: uint64, equal for identical table rows (and rarely for others).

    sketch_RK: standardised columns. codes_RC: uint8 [R, 8], eight of them in quarters of a standard deviation from 128.
    squares_R: float32, sum of the squared sketch.
    """

    norms_R: NDArray[np.float64]
    zero_R: NDArray[np.bool_]
    nonfinite_R: NDArray[np.bool_]
    keys_R: NDArray[np.uint64]
    sketch_RK: NDArray[np.float32]
    codes_RC: NDArray[np.uint8]
    squares_R: NDArray[np.float32]


def gather(
    store: RowStore, rows_N: NDArray[np.int64], rows_per_block: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    """Chosen table rows (ascending) in blocks: their indices and raw bytes [N, B]; neighbours are read in one call."""
    import numpy as np

    for first in range(0, len(rows_N), rows_per_block):
        chosen = rows_N[first : first + rows_per_block]
        raw = np.empty((len(chosen), store.row_bytes), dtype=np.uint8)
        breaks = np.flatnonzero(np.diff(chosen) != 1) + 1
        edges = [0, *breaks.tolist(), len(chosen)]
        for a, b in itertools.pairwise(edges):
            raw[a:b] = store.raw_rows(int(chosen[a]), int(chosen[b - 1]) + 1)
        yield chosen, raw


def build_reference(store: RowStore, decoder: RowDecoder) -> Reference:
    """Read the sample; NaN-free whatever the table holds. A table without an ordinary row gives centre 0 and scale 0."""
    import numpy as np
    import torch

    num_samples = max(1, min(SAMPLE_ROWS, SAMPLE_ELEMENTS // store.num_dims, store.num_rows))
    run = min(8, num_samples) if num_samples < store.num_rows else 1  # neighbours cost one read
    starts = np.linspace(0, store.num_rows - run, max(1, num_samples // run)).astype(np.int64)
    rows = np.unique((starts[:, None] + np.arange(run)).ravel())
    blocks = [decoder.widen(raw, None).to(torch.float64).numpy() for _, raw in gather(store, rows, decoder.rows_per_block)]
    sample = np.concatenate(blocks)
    with np.errstate(all="ignore"):
        norms = safe_row_norms(sample)
        usable = np.isfinite(norms) & (norms > 0)
        if usable.any():
            usable &= norms <= 10 * np.median(norms[usable])
        sample = sample[usable]
        median = float(np.median(norms[usable])) if usable.any() else 0.0
        centre = sample.mean(axis=0) if len(sample) else np.zeros(store.num_dims)
        num_columns = min(MAX_SKETCH_COLUMNS, store.num_dims, max(NUM_CODE_COLUMNS, (1 << 25) // store.num_rows))
        columns = np.arange(num_columns, dtype=np.int64) * (store.num_dims // num_columns)
        deviation = (sample[:, columns] - centre[columns]) if len(sample) else np.zeros((1, num_columns))
        spread = safe_row_norms(deviation.T) / np.sqrt(len(deviation))
        scale = np.where((spread > 1e-300) & np.isfinite(spread), 1 / spread, 0.0)
    return Reference(sample_SD=sample, median_norm=median, centre_D=centre, columns_K=columns, scale_K=scale)


def scan_rows(store: RowStore, decoder: RowDecoder, reference: Reference, num_threads: int | None) -> RowScan:
    """The pass, on `num_threads` threads that share the blocks (None: `default_threads`). Call under `single_threaded_torch`."""
    import numpy as np
    import torch

    num_columns = len(reference.columns_K)
    scan = RowScan(
        norms_R=np.empty(store.num_rows),
        zero_R=np.zeros(store.num_rows, dtype=np.bool_),
        nonfinite_R=np.zeros(store.num_rows, dtype=np.bool_),
        keys_R=np.empty(store.num_rows, dtype=np.uint64),
        sketch_RK=np.empty((store.num_rows, num_columns), dtype=np.float32),
        codes_RC=np.full((store.num_rows, NUM_CODE_COLUMNS), 128, dtype=np.uint8),
        squares_R=np.empty(store.num_rows, dtype=np.float32),
    )
    count = min(num_threads or default_threads(), -(-store.num_rows // decoder.rows_per_block))
    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        # `next` on an iterator is atomic: the threads share it, so that none waits for a slower one.
        blocks = iter(range(0, store.num_rows, decoder.rows_per_block))
        _join([pool.submit(_scan_blocks, store, decoder, reference, scan, blocks) for _ in range(count)])
        chunks = iter(range(0, store.num_rows, _SKETCH_ROWS))
        _join([pool.submit(_finish_sketches, reference, scan, chunks, decoder.is_double) for _ in range(count)])
    return scan


@contextmanager
def single_threaded_torch() -> Iterator[None]:
    """Our threads share the work, so torch starts none of its own (they would fight over the CPUs); put back at the end."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _join(jobs: list[Future[None]]) -> None:
    for job in jobs:
        job.result()


def default_threads() -> int:
    """Up to four of the CPUs that this process may use: beyond that memory bandwidth decides."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, usable)


def _scan_blocks(store: RowStore, decoder: RowDecoder, reference: Reference, scan: RowScan, starts: Iterator[int]) -> None:
    """The part that touches every byte; as few Python steps a block as possible, since threads share the interpreter."""
    import numpy as np
    import torch

    buffer = decoder.buffer()
    sketch = torch.from_numpy(scan.sketch_RK)
    with np.errstate(all="ignore"):
        for start in starts:
            stop = min(start + decoder.rows_per_block, store.num_rows)
            raw = store.raw_rows(start, stop)
            wide = decoder.widen(raw, buffer)
            _measure_norms(decoder, raw, wide, scan, start)
            picked = reference.pick(wide)
            sketch[start:stop] = reference.standardise(picked) if decoder.is_double else picked


def _measure_norms(decoder: RowDecoder, raw_RB: NDArray[np.uint8], wide_RD: torch.Tensor, scan: RowScan, start: int) -> None:
    import numpy as np
    import torch

    norms = torch.linalg.vector_norm(wide_RD, dim=1).to(torch.float64).numpy()
    scan.norms_R[start : start + len(norms)] = norms
    low = _LOW_FLOAT64 if decoder.is_double else _LOW_FLOAT32
    suspects = np.flatnonzero(~((norms > low) & (norms < np.inf)))
    step = max(1, _EXACT_ELEMENTS // decoder.num_dims)
    for first in range(0, len(suspects), step):
        chosen = suspects[first : first + step]
        rows = raw_RB[chosen]
        zero = decoder.zero_rows(rows)
        scan.zero_R[start + chosen] = zero
        scan.norms_R[start + chosen[zero]] = 0.0
        exact = safe_row_norms(decoder.exact(rows[~zero]))
        scan.norms_R[start + chosen[~zero]] = exact
        if not np.isfinite(exact).all():  # finite float64 values may still have a norm beyond float64: only values decide
            scan.nonfinite_R[start + chosen[~zero]] = ~np.isfinite(decoder.exact(rows[~zero])).all(axis=1)


def _finish_sketches(reference: Reference, scan: RowScan, starts: Iterator[int], standardised: bool) -> None:
    """Standardise the picked columns in place, in large chunks, and derive keys, codes and squares from them.

    Keys come from the bits of the picked values, so that identical table rows have equal keys wherever they stand.
    """
    import numpy as np
    import torch

    num_columns = scan.sketch_RK.shape[1]
    odd = np.arange(1, 2 * num_columns, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # an odd product of odd factors
    step = max(1, num_columns // NUM_CODE_COLUMNS)
    for start in starts:
        chunk = torch.from_numpy(scan.sketch_RK[start : start + _SKETCH_ROWS])
        where = slice(start, start + len(chunk))
        words: NDArray[Any] = chunk.numpy().view(np.uint64 if num_columns % 2 == 0 else np.uint32)
        scan.keys_R[where] = np.einsum("rk,k->r", words, odd[: words.shape[1]])
        if not standardised:
            chunk.copy_(reference.standardise(chunk))
        torch.sum(chunk.square(), dim=1, out=torch.from_numpy(scan.squares_R[where]))
        codes = chunk[:, ::step][:, :NUM_CODE_COLUMNS].mul(CODES_PER_SPREAD).add_(128).nan_to_num_(0).clamp_(0, 255)
        torch.from_numpy(scan.codes_RC[where])[:, : codes.shape[1]] = codes.to(torch.uint8)
