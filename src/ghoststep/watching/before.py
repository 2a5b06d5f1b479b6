"""Gradient norms before clipping, read as seldom as possible.

torch's clip computes every tensor's norm anyway; where it runs, its numbers are kept. Where nothing writes to the gradients between
the last backward and the optimizer's step, they are the norms that the optimizer is given. Only where something else writes to them
(another clip, a scaler that unscales) are they measured after each backward. A watch begins with measuring, and measures again as
soon as it meets a write that it cannot explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ghoststep.remedies.clip_gradients import is_sharded
from ghoststep.watching.measure import TensorNorms

if TYPE_CHECKING:
    import torch

SURE_AFTER = 3
"""Steps in a row whose gradients were explained, after which they are not measured after each backward any more."""


class Before:
    """The norms before clipping of the step that is being put together."""

    def __init__(self, norms: TensorNorms) -> None:
        # The version of a sharded tensor does not rise where its shard is written to: those are always measured.
        self._norms, self._always = norms, any(is_sharded(p) for p in norms.parameters)
        self._num_explained = 0
        self._measured: torch.Tensor | None = None
        self._clipped: torch.Tensor | None = None
        self._versions: list[tuple[int, int]] = []
        self._began: list[tuple[int, int]] | None = None
        self.seen: list[tuple[int, int]] = []
        """Versions as a backward's beginning or end saw them last; empty where no parameter had a gradient."""
        self._has_seen = self._has_all = False

    @property
    def is_measuring(self) -> bool:
        """True while norms are measured after each backward."""
        return self._always or self._num_explained < SURE_AFTER

    def keeps_measuring(self) -> None:
        """From here on measure after each backward: a scaler changes gradients before they are clipped, or a gate asks early."""
        self._always = True

    def wants_clips(self) -> bool:
        """True if the norms of torch's clip would be used."""
        return not self._always

    def begin_backward(self) -> bool:
        """Before a backward, perhaps another model's. False if gradients of this step are gone: cleared, and no step used them."""
        there = self._norms.has_any()
        self._began = self._norms.versions() if there else None
        self.seen = self._began or []
        return there or not self._has_seen

    def end_backward(self) -> bool:
        """After it: gradients have been added to, or False if none of ours was."""
        versions = self.seen = self._norms.versions()
        if (self._began is None and not any(key for key, _ in versions)) or versions == self._began:
            return False
        self._versions, self._has_seen = versions, True
        self._clipped = None
        self._measured = self._norms.of() if self.is_measuring else None
        return True

    def clipped(self, gradients: Sequence[torch.Tensor], norms: Sequence[torch.Tensor]) -> None:
        """torch's clip knows these norms. Of two clips of one gradient the first counts."""
        import torch

        found, is_all = self._norms.placed(gradients, norms)
        if found is not None:
            old = self._clipped
            self._has_all = is_all or (self._has_all and old is not None)
            self._clipped = found if old is None else torch.where((old >= 0) | old.isnan(), old, found)

    def now(self) -> torch.Tensor | None:
        """[P] as far as they are known before the optimizer's step."""
        return self._measured if self._measured is not None else self._clipped

    def at_step(self, after: torch.Tensor | None, versions: list[tuple[int, int]]) -> torch.Tensor | None:
        """[P] for the record, once the optimizer has stepped; None if something unexplained wrote to the gradients.

        after: norms of every gradient now, where all of them were measured. versions: now.
        """
        import torch

        is_same = versions == self._versions
        known = self._measured
        if known is None and self._clipped is not None:
            known = self._clipped
            rest = None if self._has_all else self._norms.of() if after is None else after
            if rest is not None:  # gradients that no clip was given are as they were
                known = torch.where((known >= 0) | known.isnan(), known, rest)
        elif known is None and is_same:
            known = self._norms.of() if after is None else after
        is_explained = is_same or self._clipped is not None
        self._num_explained = self._num_explained + 1 if is_explained else 0
        return known

    def reset(self) -> None:
        """The step is over."""
        self._has_seen = False
        self._measured = self._clipped = None
