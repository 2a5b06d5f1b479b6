"""Norms of gradients and samples of weights, on their own device, without a read by the host.

P parameters in the model's order; K places of a batch; everything float32 but what can overflow, which is float64 (float32 on
devices that have no float64).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ghoststep.remedies.clip_gradients import is_sharded, local
from ghoststep.watching.stuck import StuckElements

if TYPE_CHECKING:
    import torch

NUM_PLACES = 4
"""Places with the largest gradients that a step keeps."""

SAMPLED_TENSORS = 64
SAMPLED_ELEMENTS = 64
"""Weights watched for movement: at most this many tensors, spread over the model, and the first elements of each."""


def wide(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has none."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64


class TensorNorms:
    """Norms of the gradients of a fixed list of parameters as one vector."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], device: torch.device) -> None:
        import torch

        self.parameters = parameters
        self.device = device
        self.none = torch.full((), -1.0, dtype=torch.float32, device=device)
        self.sampled: Sequence[int] = range(len(parameters))
        """Parameters that speak for all where looking at each takes too long (thousands of them): set by who knows the tables."""
        self._places: tuple[tuple[int, ...], torch.Tensor] | None = None

    def of(self, chosen: Sequence[int] | None = None) -> torch.Tensor | None:
        """float32 [P]: L2 of each gradient (a sharded one: of this rank's shard), -1 for none; None if no parameter has one.

        chosen: only these parameters, the others count as having none. torch's own foreach norm, so that the same numbers
        come out that its clip adds up. Cost: one pass over the gradients.
        """
        import torch

        indices = range(len(self.parameters)) if chosen is None else chosen
        gradients = [(i, g) for i in indices if (g := self.parameters[i].grad) is not None]
        if not gradients:
            return None
        dense: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[torch.Tensor]]] = {}
        for i, g in gradients:
            values = g
            if g.layout is not torch.strided:
                values = g.coalesce()._values()
            elif is_sharded(g) or g.is_complex():
                values = local(g)
            places, members = dense.setdefault((values.device, values.dtype), ([], []))
            places.append(i)
            members.append(values)
        found = [self.none] * len(self.parameters)
        for places, members in dense.values():
            for i, norm in zip(places, torch._foreach_norm(members, 2), strict=True):
                found[i] = norm
        if len(dense) > 1 or next(iter(dense)) != (self.device, torch.float32):
            found = [n.to(device=self.device, dtype=torch.float32, non_blocking=True) for n in found]
        return torch.stack(found)

    def placed(self, gradients: Sequence[torch.Tensor], norms: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, bool]:
        """[P] of norms that somebody else computed, one for each of these gradients, and whether that is every gradient of ours;
        None if they do not fit together.

        Cost: one pass over the list, nothing is read of the gradients.
        """
        import torch

        if any(n.device != self.device or n.dtype != torch.float32 for n in norms[:1]) or is_sharded(norms[0]):
            return None, False
        if len(gradients) == len(self.parameters) and all(gradients[i] is self.parameters[i].grad for i in self.sampled):
            return torch.stack(list(norms)), True  # the usual call: every parameter, in the model's order
        index_of = {id(p.grad): i for i, p in enumerate(self.parameters) if p.grad is not None}
        places = tuple(index_of.get(id(g), -1) for g in gradients)
        stacked = torch.stack(list(norms))
        known = {i for i in places if i >= 0}
        if not known:
            return None, False
        if self._places is None or self._places[0] != places:
            # from this parameter's place to its norm's; the last one, a norm of -1, is for those that have none
            norm_at = {p: n for n, p in enumerate(places) if p >= 0}
            chosen = [norm_at.get(i, len(places)) for i in range(len(self.parameters))]
            self._places = places, torch.tensor(chosen).to(self.device, non_blocking=True)
        return torch.cat([stacked, self.none.reshape(1)]).index_select(0, self._places[1]), len(known) == len(index_of)

    def versions(self) -> list[tuple[int, int]]:
        """What tells whether a gradient was replaced or written to since, for the sampled ones: nothing of it is read."""
        import torch

        plain = torch.Tensor  # a DTensor's own version stays while its shard is added to
        return [
            (0, 0) if (g := p.grad) is None else (id(g), (g if type(g) is plain else getattr(g, "_local_tensor", g))._version)
            for p in (self.parameters[i] for i in self.sampled)
        ]

    def has_any(self) -> bool:
        """True if a parameter has a gradient."""
        return any(p.grad is not None for p in self.parameters)

    def any_nonfinite(self, chosen: Sequence[int]) -> bool:
        """True if a gradient among these holds inf or NaN. Waits for the device."""
        gradients = (self.parameters[i].grad for i in chosen)
        values = [g.coalesce()._values() if g.is_sparse else local(g) for g in gradients if g is not None]
        return any(not bool(v.isfinite().all()) for v in values)


def largest_places(gradient: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """The places of one embedding's output whose gradients are largest.

    gradient: [..., D] at the embedding's output; ids: [...], what was looked up. weight: the table [rows, D], or None where its
    rows cannot be read. Returns [min(K, places), 4]: gradient norm, id, flat place, norm of the table row (-1: not readable).
    Places are compared by their largest element, which cannot overflow; a NaN counts as larger than everything.
    """
    import torch

    kind = wide(gradient.device)
    flat = gradient.reshape(-1, gradient.shape[-1])
    # The largest magnitude without a copy; on CPUs forty times as fast as vector_norm with ord=inf.
    magnitude = torch.maximum(flat.amax(dim=-1), flat.amin(dim=-1).neg())
    place = magnitude.topk(min(NUM_PLACES, len(magnitude))).indices
    chosen = ids.reshape(-1).index_select(0, place)
    norm = torch.linalg.vector_norm(flat.index_select(0, place).to(kind), dim=-1)
    return torch.stack([norm, chosen.to(kind), place.to(kind), row_norms(weight, chosen, kind, like=norm)], dim=1)


def row_norms(weight: torch.Tensor | None, ids: torch.Tensor, kind: torch.dtype, *, like: torch.Tensor) -> torch.Tensor:
    """Norms of table rows, [K]; -1 where the table cannot be read by rows."""
    import torch

    if weight is None:
        return torch.full_like(like, -1.0)
    rows = weight.detach().index_select(0, ids.clamp(0, weight.shape[0] - 1).to(weight.device))
    norms: torch.Tensor = torch.linalg.vector_norm(rows.to(kind), dim=-1)
    return norms.to(like.device)


class WeightSample:
    """The first elements of some tensors, to see how far an optimizer step moves the weights."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        floating = [p for p in parameters if p.is_floating_point() and local(p.detach()).numel()]
        stride = max(1, -(-len(floating) // SAMPLED_TENSORS))
        self.parameters = floating[::stride]
        sizes = [min(SAMPLED_ELEMENTS, local(p.detach()).numel()) for p in self.parameters]
        self.num_elements = sum(sizes)
        self.stuck = StuckElements.of(self.parameters, sizes)
        """Where 16-bit weights train."""
        self._last: torch.Tensor | None = None

    def take(self) -> torch.Tensor | None:
        """Now, float32 [num_elements], or None if nothing floating trains."""
        import torch

        if not self.parameters:
            return None
        device = self.parameters[0].device
        parts = [local(p.detach()).reshape(-1)[:SAMPLED_ELEMENTS].to(device, torch.float32) for p in self.parameters]
        return torch.cat(parts)

    def keep(self) -> None:
        """Remember the weights as they are."""
        now, last = self.take(), self._last
        self._last = now
        self._tell_stuck(last, now)

    def _tell_stuck(self, last: torch.Tensor | None, now: torch.Tensor | None) -> None:
        if self.stuck is not None and last is not None and now is not None:
            self.stuck.saw(last, now)

    def moved(self) -> torch.Tensor | None:
        """0-dim: norm of the change since the last call (or `keep`) over the norm of the sample."""
        import torch

        now, last = self.take(), self._last
        self._last = now
        if now is None or last is None:
            return None
        self._tell_stuck(last, now)
        change: torch.Tensor = torch.linalg.vector_norm(now - last) / torch.linalg.vector_norm(last).clamp_min(1e-30)
        return change
