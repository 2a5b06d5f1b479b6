"""Facts that are only drawn, never judged. T positions, S source positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.evidence.base import Evidence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class InfluenceMap(Evidence):
    """The influence of every position on every other in one example of the first batch.

    matrix_ST: float64, as in `Influence`, with the pairs that it left out; NaN where neither was looked at (long examples, models
        that had to be perturbed). example: which one. num_backward: passes over the batch that this cost.
    """

    matrix_ST: NDArray[np.float64]
    example: int
    num_backward: int
