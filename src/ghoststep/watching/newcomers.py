"""Parameters that train although the watch does not measure them: thawed, added or put in another's place since it started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ghoststep.watching.seams import plain_name

if TYPE_CHECKING:
    import torch


class Newcomers:
    """Compares the model's parameters with those of the start, by identity. Nothing of them is read."""

    def __init__(self, model: torch.nn.Module, watched: Sequence[torch.nn.Parameter], *, is_swapping: bool) -> None:
        """is_swapping: FSDP, which puts whole parameters in the place of shards and back: only thawed ones are looked for."""
        self._model = model
        self._watched = {id(p) for p in watched}
        self._others = [(n, p) for n, p in model.named_parameters() if id(p) not in self._watched]
        self._is_swapping = is_swapping
        self.gone: set[int] = set()
        """Ids of watched parameters that were not in the model any more when it was last looked at."""

    def told(self) -> str:
        """How many there are and what follows, or "". Cost: a walk over the modules, 1 ms for a thousand."""
        current = self._others if self._is_swapping else list(self._model.named_parameters())
        if not self._is_swapping:
            self.gone = self._watched - {id(p) for _, p in current}
        names = [plain_name(n) for n, p in current if p.requires_grad and id(p) not in self._watched]
        if not names:
            return ""
        return (
            f"{len(names)} of the model's parameters (such as {names[0]}) train since the watch started and are in no norm: they were "
            "thawed, added or put in another's place. Start another watch there"
        )
