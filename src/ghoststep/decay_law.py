"""How far weight decay shrinks a table row that no batch ever feeds, and at which step it crosses a line.

Decoupled decay multiplies such a row by (1 - c · lr_t) at every step, c the weight decay. After N steps its norm is
n_0 · exp(-E), E = sum over t < N of -log(1 - c · lr_t).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A learning rate in closed form: warm-up from peak/W to peak over W steps, then constant, linear or cosine down.

    kind: "constant", "linear" or "cosine". total: steps in all, warm-up included (not needed for "constant"). floor: share of
    the peak that is left at the end. After `total` the floor is kept.
    """

    kind: str
    peak: float
    warm_up: int = 0
    total: int = 0
    floor: float = 0.0

    def lr(self, step: int) -> float:
        """The learning rate of step 0, 1, ..."""
        if step < self.warm_up:
            return self.peak * (step + 1) / self.warm_up
        return self.peak * self._level(step - self.warm_up)

    def _level(self, after: int) -> float:
        if self.kind == "constant":
            return 1.0
        share = min(1.0, after / max(self.total - self.warm_up, 1))
        down = share if self.kind == "linear" else (1 - math.cos(math.pi * share)) / 2
        return 1 - (1 - self.floor) * down

    def exponent(self, steps: int, decay: float) -> float:
        """E after `steps` steps, in closed form to second order in c · lr (third: (c · lr)² / 3 of it, 3e-5 at c · lr = 0.01)."""
        first, second = self._sums(steps)
        return decay * self.peak * first + (decay * self.peak) ** 2 / 2 * second

    def _sums(self, steps: int) -> tuple[float, float]:
        """Sums of lr/peak and of its square over the first steps. A sum over steps is the integral plus half of both ends."""
        warm = min(steps, self.warm_up)
        first = warm * (warm + 1) / (2 * self.warm_up) if self.warm_up else 0.0
        second = warm * (warm + 1) * (2 * warm + 1) / (6 * self.warm_up**2) if self.warm_up else 0.0
        if steps <= self.warm_up:
            return first, second
        after, span = steps - self.warm_up, float(max(self.total - self.warm_up, 1))
        if self.kind == "constant":
            return first + after, second + after
        u = min(float(after), span)
        rest = after - u
        if self.kind == "linear":
            b = (1 - self.floor) / span
            more, square = u - b * u**2 / 2, u - b * u**2 + b**2 * u**3 / 3
        else:
            mid, half, w = (1 + self.floor) / 2, (1 - self.floor) / 2, math.pi / span
            more = mid * u + half * math.sin(w * u) / w
            square = mid**2 * u + 2 * mid * half * math.sin(w * u) / w + half**2 * (u / 2 + math.sin(2 * w * u) / (4 * w))
        end = self._level(int(u))
        return first + more + (1 - end) / 2 + rest * end, second + square + (1 - end**2) / 2 + rest * end**2

    def crossing(self, norm: float, line: float, decay: float, *, horizon: int | None = None) -> int | None:
        """The smallest number of steps after which a row of `norm` is at or below `line`; None if not within the horizon (or at
        most 1e12 steps)."""
        needed = math.log(norm / line)
        high = horizon if horizon is not None else 10**12
        if needed <= 0:
            return 0
        if self.exponent(high, decay) < needed:
            return None
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.exponent(middle, decay) >= needed else (middle, high)
        return high


def exponents(steps: Sequence[int], lrs: Sequence[float], decay: float) -> list[float]:
    """E at each of the given steps for any curve, from learning rates sampled there (trapezoids between samples).

    steps: ascending, the first is 0. Exact where every step is sampled. inf from the step on where c · lr reaches 1.
    """
    found = [0.0]
    for (a, b), (x, y) in zip(itertools.pairwise(steps), itertools.pairwise(lrs), strict=True):
        first, last = _log_shrink(x, decay), _log_shrink(y, decay)
        width = b - a
        found.append(found[-1] + (width * (first + last) + (first - last)) / 2)  # steps a .. b - 1 of a straight line
    return found


def _log_shrink(lr: float, decay: float) -> float:
    return -math.log1p(-decay * lr) if decay * lr < 1 else math.inf


def crossing_of(steps: Sequence[int], found: Sequence[float], norm: float, line: float) -> int | None:
    """The step at which sampled exponents carry a row of `norm` to `line`; None if they never do."""
    needed = math.log(norm / line)
    if needed <= 0:
        return 0
    for (a, b), (x, y) in zip(itertools.pairwise(steps), itertools.pairwise(found), strict=True):
        if y >= needed:
            return b if not math.isfinite(y) or y == x else a + math.ceil((b - a) * (needed - x) / (y - x))
    return None
