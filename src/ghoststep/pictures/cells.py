"""The influence matrix in as many cells as there is room for.

T targets (who looks), S sources (who is seen), K cells a side. Rows of a picture are targets, columns are sources, as attention
masks are drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ghoststep.evidence.batch import BatchFacts
    from ghoststep.evidence.influence import Influence

STRONG = 1.0
MIDDLE = 0.1
WEAK = 0.01
FORBIDDEN_ERROR = 1e-3  # as `visible-future` and its neighbours judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Forbidden:
    """Which pairs must not be, by the intent that the batch and the setup declare.

    pairs_TS: bool. padding_T: bool, the target itself is padding (nothing is forbidden to it). words: what is forbidden, for a
    legend; empty when nothing says that anything is.
    """

    pairs_TS: NDArray[np.bool_]
    padding_T: NDArray[np.bool_]
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Blocks of `size` positions. A block that holds both kinds of pairs keeps them apart.

    allowed_KL / forbidden_KL: the largest influence among the pairs of that kind (NaN: none of them was looked at).
    is_forbidden_KL: every pair of the block is forbidden. padding_K: every target of the block is padding.
    """

    size: int
    allowed_KL: NDArray[np.float64]
    forbidden_KL: NDArray[np.float64]
    is_forbidden_KL: NDArray[np.bool_]
    padding_K: NDArray[np.bool_]


def forbidden_pairs(influence: Influence, batch: BatchFacts | None) -> Forbidden:
    """The future where the intent is causal, padding seen by real tokens, other announced documents. O(S·T)."""
    import numpy as np

    num_sources, num_targets = influence.matrix_ST.shape
    example, end = influence.matrix_example, max(num_sources, num_targets)
    source_S, target_T = np.arange(num_sources), np.arange(num_targets)
    pairs_TS = np.zeros((num_targets, num_sources), dtype=bool)
    words: list[str] = []
    if influence.intent.causal:
        pairs_TS |= source_S[None, :] > target_T[:, None]
        words.append("the future")
    padding = _of_example(None if batch is None else batch.padding_BT, example, end)
    document = _of_example(None if batch is None else batch.document_BT, example, end)
    padded = np.zeros(end, dtype=bool) if padding is None else padding.astype(bool)
    if padded.any():
        pairs_TS |= padded[None, :num_sources]
        words.append("padding")
    if document is not None and len(np.unique(document[~padded])) > 1:
        pairs_TS |= document[None, :num_sources] != document[:num_targets, None]
        words.append("other documents")
    pairs_TS[padded[:num_targets]] = False  # what padding sees reaches nobody who counts
    return Forbidden(pairs_TS=pairs_TS, padding_T=padded[:num_targets], words=tuple(words))


def _of_example(values_BT: NDArray[np.generic] | None, example: int, end: int) -> NDArray[np.generic] | None:
    """The example's values if they cover the matrix: a batch of another shape says nothing about it."""
    if values_BT is None or example >= values_BT.shape[0] or values_BT.shape[1] < end:
        return None
    return values_BT[example, :end]


def cells(influence: Influence, forbidden: Forbidden, max_cells: int) -> Cells:
    """The matrix in at most `max_cells` blocks a side, each the maximum of its pairs: nothing that was seen gets lost."""
    import numpy as np

    values_TS = np.abs(influence.matrix_ST.T)
    longest = max(*values_TS.shape, 1)
    size = -(-longest // max(1, max_cells))
    rows, columns = (np.arange(0, n, size) for n in values_TS.shape)
    if not len(rows) or not len(columns):
        empty = np.zeros((len(rows), len(columns)))
        return Cells(
            size=size, allowed_KL=empty, forbidden_KL=empty, is_forbidden_KL=empty > 0, padding_K=np.zeros(len(rows), bool)
        )

    def largest(chosen_TS: NDArray[np.bool_]) -> NDArray[np.float64]:
        kept = np.where(chosen_TS, values_TS, np.nan)
        blocks: NDArray[np.float64] = np.fmax.reduceat(np.fmax.reduceat(kept, rows, axis=0), columns, axis=1)
        return blocks

    every = np.logical_and.reduceat(np.logical_and.reduceat(forbidden.pairs_TS, rows, axis=0), columns, axis=1)
    return Cells(
        size=size,
        allowed_KL=largest(~forbidden.pairs_TS),
        forbidden_KL=largest(forbidden.pairs_TS),
        is_forbidden_KL=every,
        padding_K=np.logical_and.reduceat(forbidden.padding_T, rows),
    )


def shade(value: float, floor: float) -> int | None:
    """0 nothing (up to `floor`: rounding), 1 … 4 by powers of ten; None where nothing was looked at."""
    if math.isnan(value):
        return None
    if value <= floor:
        return 0
    return 1 + (value >= WEAK) + (value >= MIDDLE) + (value >= STRONG)


def strongest_forbidden(influence: Influence, forbidden: Forbidden) -> tuple[float, int, int] | None:
    """(influence, source, target) of the strongest forbidden pair above the floor, or None."""
    import numpy as np

    values_TS = np.where(forbidden.pairs_TS, np.nan_to_num(np.abs(influence.matrix_ST.T), nan=0.0, posinf=np.inf), 0.0)
    if not values_TS.size or not values_TS.max() > influence.floor:
        return None
    target, source = np.unravel_index(int(values_TS.argmax()), values_TS.shape)
    return float(values_TS[target, source]), int(source), int(target)
