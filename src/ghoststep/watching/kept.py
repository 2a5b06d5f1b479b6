"""Gradients that stay from one optimizer step to the next backward, because nothing clears them.

Between the end of an optimizer's step and its next one, every gap outside of a backward is looked at: from the step's end to a
backward's start, from a backward's end to the next one's start. Where a gradient was replaced, taken away or written to in one of
them, something cleared it, or changed it on purpose. Not the last gap, from a backward's end to the step itself: clipping and
unscaling write there. What a counter of versions cannot see (`p.grad.data.zero_()`, a kernel of one's own) the device does: the
norms of a few gradients when a backward begins, against those after the step or backward before. They are taken only while no
write was seen, so that a loop that clears its gradients pays for a comparison of numbers on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.watching.measure import TensorNorms

if TYPE_CHECKING:
    import torch

Versions = Sequence[tuple[int, int]]

MAX_LOOKED = 64
"""Gradients of one optimizer whose versions are compared, spread over it: `zero_grad` reaches all of them."""

MAX_MEASURED = 4
"""Of those, gradients whose norms are taken where no write was seen."""

SAME_NORM = 1e-5
"""Relative difference of two norms of one float32 gradient: the same kernel over the same numbers gives the same bits; room for one
whose order of adding is not fixed."""


@dataclass(slots=True, kw_only=True)
class _Cycle:
    """From one step of an optimizer to its next. places: of the compared gradients in `TensorNorms.versions()`. left: [P] norms as the
    last step or backward left them. same: 0-dim, True while they were the same when the next backward began. has_more: a backward
    has added to them since the step.
    is_kept: True: no write so far; False: cleared, or changed on purpose; None: cannot be told."""

    places: list[int]
    measured: list[int]
    left: torch.Tensor | None
    same: torch.Tensor | None = None
    is_kept: bool | None = True
    has_more: bool = False

    def note(self, same: torch.Tensor) -> None:
        """One more look."""
        self.same = same if self.same is None else self.same & same


class Kept:
    """Whether each optimizer's gradients were cleared between its steps. Nothing here waits for the device."""

    def __init__(self, norms: TensorNorms) -> None:
        self._norms = norms
        self._cycles: weakref.WeakKeyDictionary[Any, _Cycle] = weakref.WeakKeyDictionary()
        self._last: Versions = ()
        self._is_inside = False

    def forget(self) -> None:
        """The state that all this was about is no more."""
        self._cycles.clear()
        self._last, self._is_inside = (), False

    def began(self, now: Versions) -> None:
        """A backward begins. now: versions of the gradients; empty where there is none at all."""
        self._is_inside = True
        for cycle in self._cycles.values():
            if cycle.is_kept:
                self._gap(cycle, now)
        self._last = now

    def _gap(self, cycle: _Cycle, now: Versions) -> None:
        if not now or self._has_changed(cycle, now) or cycle.left is None:
            cycle.is_kept, cycle.left, cycle.same = False, None, None
            return
        found = self._norms.of(cycle.measured)
        if found is None:
            cycle.is_kept = None
            return
        is_same = ((found - cycle.left).abs() <= SAME_NORM * cycle.left) | (found == -1)
        cycle.note(is_same.all() & (found > 0).any())  # a gradient of zeros alone is what clearing leaves behind

    def ended(self, now: Versions) -> None:
        """A backward is over."""
        self._is_inside = False
        if now != self._last:
            for cycle in self._cycles.values():
                if cycle.is_kept and self._has_changed(cycle, now):
                    cycle.has_more = True
                    cycle.left = self._norms.of(cycle.measured)
            self._last = now

    def skipped(self, now: Versions) -> None:
        """A step was not taken."""
        for cycle in self._cycles.values():
            self._look_across(cycle, now)
        self._last = now

    def stepped(
        self, optimizer: Any, places: Sequence[int], after: torch.Tensor | None, now: Versions
    ) -> bool | torch.Tensor | None:
        """An optimizer has stepped. places: of its gradients in `now`; after: [P] norms of them.

        False: its gradients were cleared since its last step; a 0-dim bool tensor: no write was seen, and whether the norms say the
        same; None: cannot be told (its first step, a step inside a backward or without one, gradients put in place by hand).
        """
        cycle = self._cycles.pop(optimizer, None)
        if self._is_inside:
            return None  # optimizers in the hooks of parameters clear there too
        for other in self._cycles.values():
            self._look_across(other, now)
        found: bool | torch.Tensor | None = None
        if cycle is not None and cycle.is_kept is False:
            found = False
        elif cycle is not None and cycle.is_kept and cycle.has_more and len(self._last) == len(now):
            is_replaced = any(self._last[k][0] != now[k][0] for k in cycle.places)
            found = None if is_replaced else cycle.same
        self._last = now
        stride = max(1, -(-len(places) // MAX_LOOKED))
        looked = [k for k in places[::stride] if now[k][0]]
        if looked and after is not None:
            stride = max(1, -(-len(looked) // MAX_MEASURED))
            measured = [self._norms.sampled[k] for k in looked[::stride]]
            self._cycles[optimizer] = _Cycle(places=looked, measured=measured, left=after)
        return found

    def _look_across(self, cycle: _Cycle, now: Versions) -> None:
        """At the step of another optimizer. A write since the last backward may be one that clips all gradients, or a clearing,
        which leaves zeros for the next backward to meet. A write after its own step is none of the first."""
        if not cycle.is_kept or not self._has_changed(cycle, now):
            return
        cycle.left = self._norms.of(cycle.measured)
        if not cycle.has_more or cycle.left is None or any(not now[k][0] for k in cycle.places):
            cycle.is_kept = False

    def _has_changed(self, cycle: _Cycle, now: Versions) -> bool:
        return len(now) != len(self._last) or any(now[k] != self._last[k] for k in cycle.places)
