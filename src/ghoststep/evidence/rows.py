"""Facts about the rows of an embedding table. R table rows, D embedding dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.evidence.base import Evidence
from ghoststep.evidence.checkpoint import Table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """Per-row measurements of one table, all read from the stored values.

    norms_R: float64 L2 norm of each row; relative error below 1e-6 from the smallest subnormal to 1e300 (nothing underflows or
        overflows on the way). NaN if a value is NaN, else inf if one is infinite.
    zero_R: bool, every stored value of the row is exactly 0.
    nonfinite_R: bool, the row holds NaN or inf.
    identical_groups: groups of ≥ 2 bit-identical, finite, non-zero rows, each ascending, largest group first.
    common_distance_R: float64 |row - c| over the ordinary distance from c, for the nearest common vector c: 1 is ordinary, near
        0 is a row that was never moved apart. Common vectors are the mean of the table and up to four points that at least
        four rows (not near-zero ones) crowd around within 0.3 of the ordinary distance: untrained rows of a tied table or a
        head lie close together, but not at the mean, and need not be small. The ordinary distance is the median over a sample
        of 256 rows, those at c itself left out. Values below 0.5 are measured; larger ones are estimates (18 % noise) from 16
        of the D columns. NaN for non-finite rows, and everywhere if D < 16.
    median_norm: float64 median over finite rows. storage: dtype in the file. smallest_nonzero: the smallest positive value
        that this storage can hold at all (5.96e-8 for fp16), so that a zero row there means "smaller than this".
    storage_note: one sentence on what the storage hides ("fp16 block scales: ..."), else None.
    """

    table: Table
    norms_R: NDArray[np.float64]
    zero_R: NDArray[np.bool_]
    nonfinite_R: NDArray[np.bool_]
    identical_groups: tuple[tuple[int, ...], ...]
    common_distance_R: NDArray[np.float64]
    median_norm: float
    storage: str
    smallest_nonzero: float
    storage_note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRows(Evidence):
    """Rows of the input embedding. `multiplier` is the factor the model applies after the lookup (1.0 if none declared)."""

    rows: RowFacts
    multiplier: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRows(Evidence):
    """Rows of the output head: its own table, or the input table when tied (`tied=True`)."""

    rows: RowFacts
    tied: bool
