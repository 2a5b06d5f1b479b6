"""Where steps wait for the host: preallocated tensors on the device of the model, copied once a flush.

P parameters, K places, `WIDTH` further numbers a step.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ghoststep.watching.measure import NUM_PLACES, wide

if TYPE_CHECKING:
    import torch

PLACE_COLUMNS = ("norm", "id", "flat", "row_before", "row_after", "micro", "table", "width")
SCALARS = ("loss", "scale", "found_inf", "moved", "kept", "stuck")
WIDTH = len(SCALARS) + NUM_PLACES * len(PLACE_COLUMNS)


@dataclass(slots=True, kw_only=True)
class HostFacts:
    """What the host knows about a step without asking the device."""

    number: int
    ended_at: float
    seconds: float | None
    num_micro_batches: int = 0
    num_dropped: int = 0
    num_tokens: int = 0
    num_losses: int = 0
    lrs: tuple[float, ...] = ()
    was_skipped: bool = False
    by_policy: bool = False
    carried: tuple[int, ...] = ()  # parameters that stepped, where not all were measured after clipping
    clip_bound: float | None = None
    clip_action: str = ""
    num_graph_nodes: int | None = None
    has_cleared: bool = False  # the gradients of an optimizer that stepped, since its last step


@dataclass(slots=True, kw_only=True)
class Flushed:
    """Steps on their way to the host. before, after: float32 [F, P]; more: [F, WIDTH]; the first len(host) rows count."""

    before: torch.Tensor
    after: torch.Tensor
    more: torch.Tensor
    host: list[HostFacts]
    copied: Any = None

    def has_arrived(self) -> bool:
        """True if the host can read the tensors without waiting."""
        return self.copied is None or bool(self.copied.query())

    def wait(self) -> None:
        """Wait for the copy."""
        if self.copied is not None:
            self.copied.synchronize()


@dataclass(slots=True, kw_only=True)
class Ring:
    """Space for `capacity` steps."""

    capacity: int
    num_parameters: int
    device: torch.device
    host: list[HostFacts] = field(default_factory=list)
    _before: Any = None
    _after: Any = None
    _more: Any = None

    def put(self, facts: HostFacts, before: torch.Tensor | None, after: torch.Tensor | None, more: torch.Tensor) -> None:
        """Append one step. before, after: float32 [P] or None (nothing had a gradient); more: [WIDTH]."""
        import torch

        if self._before is None:
            shape = (self.capacity, self.num_parameters)
            self._before = torch.full(shape, -1.0, dtype=torch.float32, device=self.device)
            self._after = torch.full(shape, -1.0, dtype=torch.float32, device=self.device)
            self._more = torch.zeros((self.capacity, WIDTH), dtype=wide(self.device), device=self.device)
        index = len(self.host)
        for place, values in ((self._before[index], before), (self._after[index], after)):
            if values is None:
                place.fill_(-1.0)
            else:
                place.copy_(values, non_blocking=True)
        self._more[index].copy_(more, non_blocking=True)
        self.host.append(facts)

    @property
    def is_full(self) -> bool:
        """True if the next step has no place."""
        return len(self.host) >= self.capacity

    def flush(self) -> Flushed | None:
        """Start the copy of everything to the host and empty the ring; None if it is empty. Does not wait."""
        import torch

        if not self.host:
            return None
        count, host = len(self.host), self.host
        self.host = []
        parts = [t[:count] for t in (self._before, self._after, self._more)]
        if self.device.type == "cpu":
            before, after, more = (p.clone() for p in parts)
            return Flushed(before=before, after=after, more=more, host=host)
        pinned = self.device.type == "cuda"
        copies = [torch.empty(p.shape, dtype=p.dtype, device="cpu", pin_memory=pinned) for p in parts]
        for copy, part in zip(copies, parts, strict=True):
            copy.copy_(part, non_blocking=True)
        # The ring's own rows may be written again at once: copies and writes queue up on the same stream.
        event = torch.get_device_module(self.device).Event()
        with contextlib.suppress(AttributeError):
            event.record()
        return Flushed(before=copies[0], after=copies[1], more=copies[2], host=host, copied=event)
