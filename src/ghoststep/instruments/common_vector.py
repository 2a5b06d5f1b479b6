"""Rows that were never moved apart: how far each table row lies from the vectors that many rows crowd around.

An untrained row need not be small. Under a tied head (and in any output head) all unused rows receive the same gradients,
so that they end up close to one common vector, which may be longer than an ordinary row and is *not* the mean of the table:
in SmolLM2-135M unused rows lie at 0.75 of the ordinary distance from the mean, like many trained ones, but within 0.01 of
each other. So crowds are looked for: a small sketch of every row is cut into cells at three widths, the fullest cells give
candidates, and a candidate counts if at least `MIN_CROWD` rows really lie close to its centre.

Power, planted in 131072 ordinary rows of 1024 dimensions: 5 rows spread by 0.001 of an ordinary row's deviation were found in
every try, 17 rows spread by 0.05 and 100 rows spread by 0.15 in two of three; smaller or looser crowds can be missed.

Shapes: R table rows, D embedding dimensions, K sketch columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ghoststep.instruments.row_blocks import RowDecoder
from ghoststep.instruments.row_scan import Reference, RowScan, gather

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ghoststep.subjects.base import RowStore

MIN_DIMS = 16
"""With fewer dimensions ordinary rows lie close together by chance."""
MIN_CROWD = 4
CLOSE = 0.3
"""Rows nearer to a centre than this share of the ordinary distance make a crowd. Two ordinary rows of SmolLM2-135M and
MiniLM-L6 are 0.45 and 0.21 apart at the nearest; MiniLM's unused rows lie within 0.18 of their centre."""
MAX_CROWDS = 4
_CELL_SHIFTS = (0, 1, 2)  # cells of a quarter, a half and one standard deviation
_CELLS_PER_WIDTH = 4
_TIGHT = 0.4  # median sketch distance within a cell worth reading; chance cells have about 0.7
_ESTIMATE_LIMIT = 0.5  # sketch estimates have 18 % noise at 16 columns: below this the distance is measured exactly
_MEMBERS_READ = 64


def common_distances(store: RowStore, decoder: RowDecoder, reference: Reference, scan: RowScan) -> NDArray[np.float64]:
    """float64 [R]: distance to the nearest common vector over the ordinary distance; see `RowFacts.common_distance_R`.

    NaN for non-finite rows, and everywhere if D < 16 or no ordinary row exists. Cost: a few passes over the sketch, and
    reading again the rows that lie close.
    """
    import numpy as np

    nearest = np.full(store.num_rows, np.nan)
    if store.num_dims < MIN_DIMS or len(reference.sample_SD) < 2:
        return nearest
    with np.errstate(all="ignore"):
        measure = _Distances(store, decoder, reference, scan)
        nearest = measure.to_centre(reference.centre_D)
        centres: list[NDArray[np.float64]] = []
        for members in _crowded_cells(reference, scan):
            if len(centres) == MAX_CROWDS:
                break
            centre = measure.centre_of(members)
            if any(measure.relative(centre[None], known)[0] < CLOSE for known in centres):
                continue
            distance = measure.to_centre(centre)
            if np.count_nonzero(distance < CLOSE) >= MIN_CROWD:
                centres.append(centre)
                nearest = np.minimum(nearest, distance)
    nearest[scan.nonfinite_R] = np.nan
    return nearest


def _crowded_cells(reference: Reference, scan: RowScan) -> Iterator[NDArray[np.int64]]:
    """Members (at most 64, evenly picked) of cells that hold many rows close together in the whole sketch."""
    import numpy as np

    # Near-zero rows are a flaw of their own and would be the only crowd found. NaN and inf fail one comparison or the other.
    rows = np.flatnonzero((scan.norms_R > 1e-3 * reference.median_norm) & ~scan.nonfinite_R)
    codes = scan.codes_RC.view(np.uint64)[:, 0][rows]
    # Cells nest: rows that share a narrow one share the widest. So what is alone there need not be sorted at any width.
    company = _in_company(_cells(codes, max(_CELL_SHIFTS)))
    rows, codes = rows[company], codes[company]
    for shift in _CELL_SHIFTS:
        cells = _cells(codes, shift)
        ordered = np.sort(cells)
        edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        starts = np.concatenate([[0], edges]) if len(ordered) else edges
        counts = np.diff(np.append(starts, len(ordered)))
        crowded = np.flatnonzero(counts >= MIN_CROWD)
        for cell in crowded[np.argsort(-counts[crowded], kind="stable")][:_CELLS_PER_WIDTH]:
            members = rows[cells == ordered[starts[cell]]]
            picked = members[np.linspace(0, len(members) - 1, min(_MEMBERS_READ, len(members))).astype(np.int64)]
            sketch = scan.sketch_RK[picked]
            spread = np.sqrt(((sketch - np.median(sketch, axis=0)) ** 2).mean(axis=1))
            if np.median(spread) < _TIGHT:
                yield picked


def _cells(codes_R: NDArray[np.uint64], shift: int) -> NDArray[np.uint64]:
    """Each byte is one column's code: shifting all at once and masking what crossed a byte widens the cells."""
    import numpy as np

    return (codes_R >> np.uint64(shift)) & np.uint64(int.from_bytes(bytes([0xFF >> shift] * 8), "little"))


def _in_company(cells_R: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """True for every row whose cell holds at least `MIN_CROWD` (and for some others: cells are counted by a hash of them)."""
    import numpy as np

    bits = min(20, max(8, len(cells_R).bit_length() + 2))
    bucket = ((cells_R * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - bits)).astype(np.int64)
    company: NDArray[np.bool_] = np.bincount(bucket, minlength=1 << bits)[bucket] >= MIN_CROWD
    return company


class _Distances:
    """Distances of all rows to one centre: estimated from the sketch, measured from the bytes where they come out small."""

    def __init__(self, store: RowStore, decoder: RowDecoder, reference: Reference, scan: RowScan) -> None:
        import numpy as np
        import torch

        self._store, self._decoder, self._reference, self._scan = store, decoder, reference, scan
        self._unit = float(np.abs(reference.sample_SD).max())  # keeps squares within float64
        self._sample_sketch = reference.standardise(reference.pick(torch.from_numpy(reference.sample_SD))).numpy()

    def centre_of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Coordinate-wise median of these rows."""
        import numpy as np

        blocks = [self._values(raw) for _, raw in gather(self._store, rows, self._decoder.rows_per_block)]
        centre: NDArray[np.float64] = np.median(np.concatenate(blocks), axis=0)
        return centre

    def to_centre(self, centre_D: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 [R] over the ordinary distance; exact (1e-6) where it comes out below 0.5."""
        import numpy as np

        columns = self._reference.columns_K
        centre_K = ((centre_D - self._reference.centre_D)[columns] * self._reference.scale_K).astype(np.float32)
        sample = _sketch_distances(self._sample_sketch, (self._sample_sketch**2).sum(axis=1), centre_K)
        distance = _over(_sketch_distances(self._scan.sketch_RK, self._scan.squares_R, centre_K), _ordinary(sample))
        close = np.flatnonzero((distance < _ESTIMATE_LIMIT) & ~self._scan.nonfinite_R)
        ordinary = self._ordinary(centre_D)
        for rows, raw in gather(self._store, close, self._decoder.rows_per_block):
            distance[rows] = _over(self._lengths(self._values(raw) - centre_D), ordinary)
        return distance

    def relative(self, rows_RD: NDArray[np.float64], centre_D: NDArray[np.float64]) -> NDArray[np.float64]:
        """Exact distances of given vectors over the ordinary distance."""
        return _over(self._lengths(rows_RD - centre_D), self._ordinary(centre_D))

    def _ordinary(self, centre_D: NDArray[np.float64]) -> float:
        return _ordinary(self._lengths(self._reference.sample_SD - centre_D))

    def _values(self, raw_RB: NDArray[np.uint8]) -> NDArray[np.float64]:
        import torch

        values: NDArray[np.float64] = self._decoder.widen(raw_RB, None).to(torch.float64).numpy()
        return values

    def _lengths(self, difference_RD: NDArray[np.float64]) -> NDArray[np.float64]:
        import numpy as np

        scaled = difference_RD / self._unit
        lengths: NDArray[np.float64] = np.sqrt(np.einsum("rd,rd->r", scaled, scaled))
        return lengths


def _sketch_distances(
    sketch_RK: NDArray[np.float32], squares_R: NDArray[np.float32], centre_K: NDArray[np.float32]
) -> NDArray[np.float64]:
    import numpy as np

    # The mean's own sketch is 0: then the squares are the answer.
    squared = squares_R - 2 * (sketch_RK @ centre_K) + centre_K @ centre_K if centre_K.any() else squares_R
    distances: NDArray[np.float64] = np.sqrt(np.maximum(squared, 0), dtype=np.float64)
    return distances


def _ordinary(distances: NDArray[np.float64]) -> float:
    """The median, over distances of at least a quarter of the 95th percentile: a crowd at the centre itself does not count."""
    import numpy as np

    limit = np.percentile(distances, 95) / 4
    return float(np.median(distances[distances >= limit]))


def _over(distances: NDArray[np.float64], ordinary: float) -> NDArray[np.float64]:
    import numpy as np

    ratio: NDArray[np.float64] = distances / ordinary if ordinary > 0 else np.where(distances > 0, np.inf, 0.0)
    return ratio
