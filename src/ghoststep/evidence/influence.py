"""Facts about who sees whom. S source positions (whose token is changed), T target positions (whose output moves)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.evidence.base import Evidence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Region(enum.Enum):
    """Which relation of source and target a reading belongs to."""

    PAST = "the own past"
    SELF = "the position itself"
    FUTURE = "the future"
    PADDING = "padding, as seen by real tokens"
    OTHER_DOCUMENT = "another announced document of the same example"
    OTHER_EXAMPLE = "another example of the batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The strongest influence found in one region, with its place.

    `relative` is the change of the target's hidden state (at the head's input) over that of the own past; `absolute` in units of
    the output. `source` and `target` are (example, position). `num_pairs` pairs were looked at.
    `method` is "swap" or "gradient", `mode` "batched" or "serial".
    """

    region: Region
    relative: float
    absolute: float
    source: tuple[int, int]
    target: tuple[int, int]
    num_pairs: int
    method: str
    mode: str
    num_above: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence(Evidence):
    """Influence on the first batch.

    matrix_ST: float64 relative influence of source on target within one example (NaN: not looked at); `matrix_example` says
        which. readings: strongest by region (absent: the region is empty here). floor: the benign noise of this model in this
        dtype, relative: anything below it is nothing. past: smallest influence of the own past that was seen (power): a clear
        needs past > floor. order_change: relative change when two earlier tokens are swapped with each other (order-blindness).
    probes_perturbed: True when zero-initialised projections had to be perturbed for power (and were put back).
    nothing_visible: (example, position) of real rows whose keys were all masked (NaN or uniform output), empty if none.
    is_causal_by_measure: True if no position moved with a later one above the floor.
    """

    matrix_ST: NDArray[np.float64]
    matrix_example: int
    readings: Mapping[Region, Reading]
    floor: float
    past: float
    order_change: float | None
    probes_perturbed: bool
    nothing_visible: tuple[tuple[int, int], ...]
    is_causal_by_measure: bool
    mode: str
    num_forward: int
    num_backward: int
