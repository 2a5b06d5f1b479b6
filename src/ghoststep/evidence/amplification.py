"""Facts about how hard a real model amplifies the gradient of one input row."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from ghoststep.evidence.base import Evidence

OVERFLOW_GRADIENT = 1.844674352395373e19
"""The root of the largest float32: a gradient norm beyond it is inf in float32."""

LOST_FACTOR = 1e3
"""Clip bounds beyond which one row's gradient takes the step: everything else shrinks a thousandfold."""

FIRST, MIDDLE, PACKED, LEFT = "first position", "middle", "start of a packed document", "first after left padding"

LAW_TOLERANCE = 5.0
"""Factor within which gradient x norm must stay from one norm to the next for the law gradient = c/(N · norm) to hold there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One row at one place. norm: of the row as the table holds it (before an embedding multiplier). gradient: L2 norm of the
    gradient of that table row, float64, from this one occurrence; NaN or inf if it is not finite. table_row: -1 for a norm that
    was only tried. direction: the table row whose direction it has, -1 for a random one. loss: what the loss read meanwhile.
    total: norm of all gradients of the model together, float64; NaN where it was not measured. is_check: measured at a norm that
    the law predicted from the others."""

    norm: float
    gradient: float
    table_row: int = -1
    direction: int = -1
    loss: float = math.nan
    total: float = math.nan
    is_check: bool = False

    @property
    def whole(self) -> float:
        """What clipping sees: `total` where it was measured, else the row's gradient alone."""
        return self.gradient if math.isnan(self.total) else self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One position of the batch. name: `FIRST`, `MIDDLE`, `PACKED` or `LEFT`."""

    name: str
    example: int
    position: int
    readings: tuple[Reading, ...]

    @property
    def is_measured(self) -> bool:
        """False where every gradient is exactly 0: no loss depends on the position, so it is no evidence of a small gradient."""
        return any(r.gradient != 0 for r in self.readings)

    @property
    def ceiling(self) -> float:
        """The largest finite gradient seen here: what depth, epsilon and weights allow. NaN if none is finite."""
        return max((r.whole for r in self.readings if math.isfinite(r.whole)), default=math.nan)

    @property
    def constant(self) -> float:
        """gradient x norm where the law holds (the median over neighbouring norms that agree); NaN if it holds nowhere."""
        agreeing = sorted(r.whole * r.norm for r in self._lawful())
        return agreeing[len(agreeing) // 2] if agreeing else math.nan

    def critical_norm(self, gradient: float) -> float:
        """The norm of a table row below which one occurrence gives more than this gradient: the law, with the constant of the
        reading nearest to that gradient. 0 if the ceiling stays below it, NaN if nothing here follows the law."""
        if not self.ceiling > gradient:
            return 0.0
        lawful = [r for r in self._lawful() if r.whole > 0]
        if not lawful:
            return math.nan
        nearest = min(lawful, key=lambda r: abs(math.log(r.whole / gradient)))
        return nearest.whole * nearest.norm / gradient

    def _lawful(self) -> list[Reading]:
        """Readings whose gradient x norm agrees with that of the next larger norm in the same direction."""
        agreeing: list[Reading] = []
        for direction in {r.direction for r in self.readings}:
            mine = (r for r in self.readings if r.direction == direction and r.norm > 0 and math.isfinite(r.whole))
            for larger, r in itertools.pairwise(sorted(mine, key=lambda r: -r.norm)):
                if r.norm < larger.norm / LAW_TOLERANCE and _agree(larger.whole * larger.norm, r.whole * r.norm):
                    agreeing.append(r)
        return agreeing


def _agree(one: float, other: float) -> bool:
    return other > 0 and 1 / LAW_TOLERANCE < one / other < LAW_TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Amplification(Evidence):
    """Measured on the model as it is: its dtype, its mode, its own loss on the first batch.

    multiplier: of the embedding, measured as output over table row. num_loss_tokens: labels of the batch that are not negative, 0
    if it carries none. bound: what gradients are clipped to (1 if nothing says). num_passes: forwards and backwards spent.
    """

    places: tuple[Place, ...]
    multiplier: float
    num_loss_tokens: int
    bound: float
    median_norm: float
    num_passes: int

    @property
    def lost(self) -> float:
        """The gradient beyond which a step is lost to one row: `LOST_FACTOR` clip bounds."""
        return LOST_FACTOR * self.bound

    @property
    def measured(self) -> tuple[Place, ...]:
        """The places that the loss depends on; see `Place.is_measured`."""
        return tuple(p for p in self.places if p.is_measured)

    def worst(self, table_row: int) -> tuple[Place, Reading] | None:
        """Where this row's gradient is largest (not finite counts as largest)."""
        found = [(p, r) for p in self.places for r in p.readings if r.table_row == table_row]
        return max(found, key=lambda pr: _size(pr[1]), default=None)

    def judged(self, table_row: int, norm: float, *, can_be_first: bool) -> tuple[Place, Reading] | None:
        """The worst reading that speaks for this row where its token may stand: in the middle, and first if it can be.

        A row that was not fed itself takes the reading of the nearest smaller one (the gradient falls as the norm grows). An exact
        zero speaks for zeros only: gates that multiply by the row can hide it. None if nothing speaks for the row: a place that
        the loss does not depend on speaks neither way, so a small gradient counts only if all the others were measured.
        """
        places = [p for p in self.places if can_be_first or p.name == MIDDLE]
        if can_be_first and all(p.name == MIDDLE for p in places):
            return None
        found = [(p, r) for p in places if p.is_measured and (r := _nearest(p, table_row, norm)) is not None]
        worst = max(found, key=lambda pr: _size(pr[1]), default=None)
        return worst if worst and (len(found) == len(places) or not worst[1].gradient <= self.lost) else None


def _nearest(place: Place, table_row: int, norm: float) -> Reading | None:
    rows = [r for r in place.readings if r.table_row >= 0]
    own = next((r for r in rows if r.table_row == table_row), None)
    below = [r for r in rows if r.norm <= norm and (r.norm == 0) == (norm == 0)]
    return own or max(below, key=lambda r: r.norm, default=None)


def _size(reading: Reading) -> tuple[bool, float]:
    return not math.isfinite(reading.gradient), reading.gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikedStep(Evidence):
    """One of the user's own train steps with the most amplified row fed, up to the optimizer.

    kept_trunk: norm of all gradients outside the input table when the optimizer stepped, over what backward had left; kept_rows:
    the same for the table's other rows. 1 is untouched, 0 lost, NaN if spoilt or if there was nothing. None in `kept_rows` where
    no other row had a gradient.
    """

    table_row: int
    place: str
    kept_trunk: float
    kept_rows: float | None

    @property
    def survives(self) -> bool:
        """Neither the trunk nor the other rows were clipped by more than `LOST_FACTOR`."""
        return all(k * LOST_FACTOR >= 1 and k < math.inf for k in (self.kept_trunk, self.kept_rows) if k is not None)
