"""Updates that 16-bit weights lose to rounding: weights that are pushed at every step of a window and never move.

N sampled elements. Rounding to the nearest number loses the same elements' updates at every step; whatever carries the lost part on
(Kahan summation) or rounds at random moves them sooner or later, and how much later a window cannot know. Only the steps of torch's own
optimizers are judged: they do neither.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.evidence.steps import STUCK_STEPS
from ghoststep.remedies.clip_gradients import local

if TYPE_CHECKING:
    import torch

LEAST_ELEMENTS = 64
"""Pushed elements below which a share says little: of 64 its standard error is at most 6 %."""


def rounds_to_nearest(optimizer: Any) -> bool:
    """True of torch's own optimizers; others may round at random or carry on what was lost."""
    return type(optimizer).__module__.partition(".")[0] == "torch"


class StuckElements:
    """Counts them on the device, without a wait. parameters: the sampled ones; sizes: elements of each in the sample."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], sizes: Sequence[int]) -> None:
        import torch

        device = parameters[0].device
        self._parameters, self._sizes = parameters, sizes
        self._is_narrow = [p.dtype in (torch.bfloat16, torch.float16) for p in parameters]
        self._nothing = [local(p.detach()).new_zeros(n, device=device) for p, n in zip(parameters, sizes, strict=True)]
        # An element stands for its share of its tensor: a sample holds as much of a bias as of a matrix.
        counts = [local(p.detach()).numel() / n for p, n in zip(parameters, sizes, strict=True)]
        self._weight_N = torch.cat([torch.full((n,), c, device=device) for n, c in zip(sizes, counts, strict=True)])
        self._stayed_N = torch.ones_like(self._weight_N, dtype=torch.bool)
        self._pushed_N = torch.ones_like(self._stayed_N)
        self._now_N: torch.Tensor | None = None
        self._num_steps = 0
        self.reason = ""
        """Why the steps of some optimizer are not judged."""

    @staticmethod
    def of(parameters: Sequence[torch.nn.Parameter], sizes: Sequence[int]) -> StuckElements | None:
        """None where no sampled parameter has 16 bits: then nothing is counted and nothing is paid."""
        import torch

        narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters)
        return StuckElements(parameters, sizes) if narrow else None

    def restart(self) -> None:
        """A new window."""
        self._stayed_N.fill_(True)
        self._pushed_N.fill_(True)
        self._now_N, self._num_steps = None, 0

    def saw(self, last_N: torch.Tensor, now_N: torch.Tensor) -> None:
        """The sample before and after something may have changed it."""
        self._stayed_N &= now_N == last_N

    def stepped(self, optimizer: Any, held: Collection[int]) -> None:
        """An optimizer has stepped, its gradients are still there. held: ids of its parameters."""
        import torch

        if not rounds_to_nearest(optimizer):
            if any(n and id(p) in held for p, n in zip(self._parameters, self._is_narrow, strict=True)):
                name = type(optimizer).__qualname__
                self.reason = (
                    f"{name} is no optimizer of torch and steps 16-bit weights: it may round at random or carry lost parts on"
                )
            return
        device = self._weight_N.device
        parts = []
        for p, is_narrow, n, nothing in zip(self._parameters, self._is_narrow, self._sizes, self._nothing, strict=True):
            g = p.grad if is_narrow and id(p) in held else None
            has_values = g is not None and g.layout is torch.strided
            parts.append(local(g).reshape(-1)[:n].to(device, non_blocking=True) if g is not None and has_values else nothing)
        gradient_N = torch.cat(parts)
        pushed_N = (gradient_N != 0) & gradient_N.isfinite()
        self._now_N = pushed_N if self._now_N is None else self._now_N | pushed_N

    def end_step(self, *, is_taken: bool) -> torch.Tensor | None:
        """After a step. At the end of a window: share of the pushed elements that stayed, 0-dim, NaN of too few; else None.

        A skipped step changes nothing and is no part of the window; a step of none but foreign optimizers pushes nothing."""
        import torch

        if not is_taken:
            self._now_N = None
            return None
        self._pushed_N = self._pushed_N & self._now_N if self._now_N is not None else torch.zeros_like(self._pushed_N)
        self._now_N = None
        self._num_steps += 1
        if self._num_steps < STUCK_STEPS:
            return None
        pushed_N = self._weight_N * self._pushed_N
        share = (pushed_N * self._stayed_N).sum() / pushed_N.sum()
        found = share.masked_fill(self._pushed_N.sum() < LEAST_ELEMENTS, float("nan"))
        self.restart()
        return found
