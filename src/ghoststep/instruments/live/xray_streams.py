"""Targets of single rows put together to targets of positions. B examples, T positions, P = B * T places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.evidence.loss import FurtherTarget, LossKind

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class Stream:
    """One target a position: all [P], on the CPU. `filled_P` says which positions a row was put at."""

    weight_P: torch.Tensor
    label_P: torch.Tensor
    top_P: torch.Tensor
    ambiguous_P: torch.Tensor
    even_P: torch.Tensor
    filled_P: torch.Tensor

    def further(self, num_examples: int) -> FurtherTarget:
        """The same as evidence [B, T]."""
        shape = (num_examples, -1)
        return FurtherTarget(
            target_BT=self.label_P.reshape(shape).numpy(), weight_BT=self.weight_P.reshape(shape).numpy(),
            target_probability_BT=self.top_P.reshape(shape).numpy(), ambiguous_BT=self.ambiguous_P.reshape(shape).numpy(),
        )  # fmt: skip


def empty_stream(num_places: int) -> Stream:
    """Nothing put in yet: no weight, no label."""
    import torch

    return Stream(
        weight_P=torch.zeros(num_places, dtype=torch.float64), label_P=torch.full((num_places,), -1, dtype=torch.int64),
        top_P=torch.full((num_places,), torch.nan, dtype=torch.float64), ambiguous_P=torch.zeros(num_places, dtype=torch.bool),
        even_P=torch.zeros(num_places, dtype=torch.bool), filled_P=torch.zeros(num_places, dtype=torch.bool),
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Rows:
    """Rows of one call with a weight: places [N], and as in `Stream` for each."""

    places: torch.Tensor
    weight: torch.Tensor
    label: torch.Tensor
    top: torch.Tensor
    ambiguous: torch.Tensor
    even: torch.Tensor


def put_together(parts: list[Rows], num_places: int) -> list[Stream]:
    """Chunks of one head fill one stream; a row for a place that is taken already opens the next one."""
    streams: list[Stream] = []
    for part in parts:
        for mine in _turns(part.places):
            where = part.places[mine]
            stream = next((s for s in streams if not bool(s.filled_P[where].any())), None)
            if stream is None:
                stream = empty_stream(num_places)
                streams.append(stream)
            stream.filled_P[where] = True
            stream.weight_P[where] = part.weight[mine]
            stream.label_P[where] = part.label[mine]
            stream.top_P[where] = part.top[mine]
            stream.ambiguous_P[where] = part.ambiguous[mine]
            stream.even_P[where] = part.even[mine]
    return streams


def _turns(places_N: torch.Tensor) -> list[torch.Tensor]:
    """Which rows come first at their place, which second, and so on: indices; rows without a place are left out."""
    seen: dict[int, int] = {}
    turns: list[list[int]] = []
    for row, place in enumerate(places_N.tolist()):
        if place < 0:
            continue
        turn = seen[place] = seen.get(place, -1) + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(row)
    return [places_N.new_tensor(t) for t in turns]


def kind_of(streams: list[Stream], residual: float, level: float = 1e-3) -> LossKind:
    """What the loss is, from all weights and target masses."""
    import torch

    weight = torch.cat([s.weight_P for s in streams]) if streams else torch.zeros(0)
    counted = weight != 0
    if not bool(counted.any()):
        return LossKind.NOTHING
    w = weight[counted]
    if bool((w < -1e-9 * w.abs().max()).any()):
        return LossKind.POLICY
    if residual > 0.05:
        return LossKind.OTHER
    top = torch.cat([s.top_P for s in streams])[counted]
    even = torch.cat([s.even_P for s in streams])[counted]
    if bool((top < 0.999).any()):
        return LossKind.SMOOTHED if bool(even[top < 0.999].all()) else LossKind.SOFT
    same = all(_is_level(s.weight_P[s.weight_P != 0], level) for s in streams)
    return LossKind.HARD if same else LossKind.WEIGHTED


def _is_level(weights: torch.Tensor, level: float) -> bool:
    return not weights.numel() or float(weights.max() - weights.min()) <= level * float(weights.max())
