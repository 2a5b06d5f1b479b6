"""Which parameters are not trained: by the optimizers that stepped, and by the gradient norms that arrive with each flush.

P parameters in the model's order, F steps of a flush. Nothing is read of a device: the norms are on the host already.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.evidence.steps import QUIET_STEPS, Step, StepOutcome, UntrainedFacts
from ghoststep.watching.newcomers import Newcomers
from ghoststep.watching.ring import Flushed

if TYPE_CHECKING:
    import torch

MOST_NAMES = 8

OVER_OWN_PAUSE = 4
"""A parameter that paused before, such as an expert or a task's head that few batches use, has stopped only where this pause is so
many times its longest one. Where uses come by chance, the longest of ten pauses is some three times the mean one: a pause of four
times that, 12 times the mean, is a chance of 6e-6."""


class Untrained:
    """Remembers for each parameter when its gradient was last not zero, and which optimizers hold it."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter], newcomers: Newcomers, given: Sequence[Any]
    ) -> None:
        """given: the optimizers that the watch was given, by then."""
        import numpy as np

        self._names, self._parameters, self._newcomers, self._given = names, parameters, newcomers, given
        count = len(names)
        self._num_learning = 0
        self._quiet_P = np.zeros(count, dtype=np.int64)  # steps in a row in which others learned and this one did not
        self._pause_P = np.zeros(count, dtype=np.int64)  # the longest one that ended
        self._last_P = np.zeros(count, dtype=np.int64)
        self._had_P = np.zeros(count, dtype=bool)
        self._held: set[int] = set()
        self._known: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._strange: list[weakref.ref[Any]] = []

    def stepped(self, optimizer: Any, indices: list[int]) -> None:
        """An optimizer has stepped; its gradients are still there. indices: of ours that it holds, the same list while they stay."""
        if self._known.get(optimizer) is not indices:
            is_new = optimizer not in self._known
            self._known[optimizer] = indices
            self._held.update(indices)
            if is_new:
                ours = {id(p) for p in self._parameters}
                held = [p for g in optimizer.param_groups for p in g["params"]]
                self._strange += [weakref.ref(p) for p in held if p.requires_grad and id(p) not in ours]
        if self._strange:  # another model's get gradients, and are not counted from then on
            self._strange = [r for r in self._strange if (p := r()) is not None and p.grad is None]

    def learned(self, flushed: Flushed, steps: Sequence[Step]) -> None:
        """Take in the norms of a flush that has arrived."""
        import numpy as np

        before_FP = flushed.before.numpy()[: len(steps)]
        alive_FP = (before_FP != 0) & (before_FP != -1)  # NaN too
        was_taken_F = np.array([s.outcome is StepOutcome.STEPPED for s in steps], dtype=bool)
        # Where nothing had a gradient (equal rewards, no label, a detached loss), no single parameter is to blame.
        learning_F = np.cumsum(alive_FP.any(axis=1) & was_taken_F)
        is_alive_P = alive_FP.any(axis=0)
        first_P, last_P = alive_FP.argmax(axis=0), len(steps) - 1 - alive_FP[::-1].argmax(axis=0)
        paused_P = self._quiet_P + np.maximum(learning_F[first_P] - 1, 0)
        self._pause_P = np.where(is_alive_P & (self._last_P > 0), np.maximum(self._pause_P, paused_P), self._pause_P)
        self._quiet_P = np.where(is_alive_P, learning_F[-1] - learning_F[last_P], self._quiet_P + learning_F[-1])
        self._last_P = np.where(is_alive_P, np.array([s.number for s in steps])[last_P], self._last_P)
        self._had_P |= (before_FP != -1).any(axis=0)
        self._num_learning += int(learning_F[-1])

    def facts(self) -> UntrainedFacts | None:
        """What is untrained by now; None while too few steps have gone by."""
        import numpy as np

        if self._num_learning < QUIET_STEPS:
            return None
        others = [i for i in range(len(self._names)) if i not in self._held and self._is_meant(i)]
        given = {id(p) for o in self._given for g in o.param_groups for p in g["params"]} if others else set()
        idle = {i for i in others if id(self._parameters[i]) in given}
        # Neither reached by the loss nor given to an optimizer: left out on purpose (features of a trunk, an unused head).
        unheld = [i for i in others if i in idle or self._last_P[i] > 0]
        is_quiet_P = (self._quiet_P >= QUIET_STEPS) & (self._quiet_P >= OVER_OWN_PAUSE * self._pause_P)
        quiet = [i for i in np.flatnonzero(is_quiet_P).tolist() if i in self._held and self._is_meant(i)]
        absent = [i for i in quiet if not self._had_P[i]]
        # The one that has been quiet for longest comes first, so that the first name stays while others follow.
        still = sorted((i for i in quiet if self._had_P[i]), key=lambda i: (int(self._last_P[i]), i))
        return UntrainedFacts(
            unheld=self._named(unheld), num_unheld=len(unheld), num_unheld_alive=int((self._last_P[unheld] > 0).sum()),
            num_idle=len(idle), num_strange=len(self._strange) if unheld else 0,
            absent=self._named(absent), num_absent=len(absent),
            still=self._named(still), num_still=len(still), still_since=tuple(int(self._last_P[i]) for i in still[:MOST_NAMES]),
        )  # fmt: skip

    def _is_meant(self, i: int) -> bool:
        """It trains still: it was not frozen meanwhile, nor taken out of the model."""
        p = self._parameters[i]
        return p.requires_grad and p.numel() > 0 and id(p) not in self._newcomers.gone

    def _named(self, chosen: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._names[i] for i in chosen[:MOST_NAMES])
