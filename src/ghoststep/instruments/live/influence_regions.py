"""From changes of hidden states to the strongest influence by region. B examples, T positions, D dimensions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ghoststep.evidence.influence import Reading, Region
from ghoststep.instruments.live.influence_plan import Block, Positions

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


def changes(hidden: torch.Tensor, base: torch.Tensor) -> NDArray[np.float64]:
    """L2 change of each hidden state over the median norm of the unperturbed ones, [B, T]. Equal NaNs are no change, a NaN that
    comes or goes is an infinite one."""
    import numpy as np
    import torch

    norm_BT = base.norm(dim=-1)
    finite = norm_BT[torch.isfinite(norm_BT) & (norm_BT > 0)]
    scale = float(finite.median()) if len(finite) else 1.0
    difference_BTD = (hidden - base).abs()
    same_nan = torch.isnan(hidden) & torch.isnan(base)
    difference_BTD = torch.where(same_nan, torch.zeros_like(base), difference_BTD)
    change_BT: NDArray[np.float64] = difference_BTD.norm(dim=-1).double().numpy() / scale
    return np.where(np.isnan(change_BT), np.inf, change_BT)


@dataclass(slots=True)
class Tally:
    """The strongest change seen in one region so far, absolute, with the past it is to be compared with."""

    absolute: float = 0.0
    source: tuple[int, int] = (-1, -1)
    target: tuple[int, int] = (-1, -1)
    num_pairs: int = 0
    values: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Regions:
    """Collects changes by region over several passes of one method and mode.

    forward / backward: the strongest change in a later / an earlier example of the batch.
    """

    method: str
    mode: str
    tallies: dict[Region, Tally] = field(default_factory=dict)
    trained_future: Tally = field(default_factory=Tally)
    out_of_order: Tally = field(default_factory=Tally)
    forward: float = 0.0
    backward: float = 0.0
    near_past: list[tuple[bool, int, int]] = field(default_factory=list)

    def add(self, region: Region, value: float, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Count one pair."""
        _count(self.tallies.setdefault(region, Tally()), value, source, target)

    def adopt_out_of_order(self, floor: float) -> None:
        """Count influence against every order of serving tokens as influence of the future, if it is stronger than that seen."""
        future = self.tallies.setdefault(Region.FUTURE, Tally())
        if self.out_of_order.absolute > max(future.absolute, floor * self.reference()):
            for tally in (future, self.trained_future):
                tally.absolute, tally.source = self.out_of_order.absolute, self.out_of_order.source
                tally.target, tally.num_pairs = self.out_of_order.target, tally.num_pairs + self.out_of_order.num_pairs
                tally.values += self.out_of_order.values

    def reference(self) -> float:
        """What a change is compared with: the median change that the own past causes, or 1 (the size of a hidden state)."""
        import numpy as np

        past = [v for v in self.tallies.get(Region.PAST, Tally()).values if np.isfinite(v) and v > 0]
        return float(np.median(past)) if past else 1.0

    def readings(self, floor: float) -> dict[Region, Reading]:
        """One reading a region that had at least one pair."""
        return {r: self.reading(r, t, floor) for r, t in self.tallies.items() if t.num_pairs}

    def reading(self, region: Region, tally: Tally, floor: float) -> Reading:
        """A tally over the reference."""
        reference = self.reference()
        return Reading(
            region=region, relative=tally.absolute / reference, absolute=tally.absolute, source=tally.source,
            target=tally.target, num_pairs=tally.num_pairs, method=self.method, mode=self.mode,
            num_above=sum(v > floor * reference for v in tally.values),
        )  # fmt: skip


def _count(tally: Tally, value: float, source: tuple[int, int], target: tuple[int, int]) -> None:
    tally.num_pairs += 1
    tally.values.append(value)
    if value > tally.absolute:
        tally.absolute, tally.source, tally.target = value, source, target


def add_swap(regions: Regions, at: Positions, change_BT: NDArray[np.float64], blocks: list[Block], *, across: bool) -> None:
    """Sort the changes that these replaced blocks caused. `across`: examples without a block count as other examples."""
    swapped = {block.example: block for block in blocks}
    for b in range(at.ids.shape[0]):
        block = swapped.get(b)
        if block is not None:
            _add_block(regions, at, change_BT, block)
        elif across and blocks:
            source = (blocks[0].example, blocks[0].start)
            for t in at.real[b].nonzero()[0].tolist():
                value = float(change_BT[b, t])
                regions.add(Region.OTHER_EXAMPLE, value, source, (b, t))
                if b < source[0]:
                    regions.backward = max(regions.backward, value)
                else:
                    regions.forward = max(regions.forward, value)
                if len(blocks) == 1 and b < source[0] and t < source[1]:
                    # Earlier in the example and earlier in the batch: no order of serving tokens that respects time lets
                    # this happen, whether it goes through the batch example by example or position by position.
                    _count(regions.out_of_order, value, source, (b, t))


def _add_block(regions: Regions, at: Positions, change_BT: NDArray[np.float64], block: Block) -> None:
    b, document = block.example, at.document[block.example, block.start]
    first, last = (b, block.start), (b, block.stop - 1)
    for t in at.real[b].nonzero()[0].tolist():
        value, target = float(change_BT[b, t]), (b, t)
        if at.document[b, t] != document:
            regions.add(Region.OTHER_DOCUMENT, value, last if t >= block.stop else first, target)
        elif t >= block.stop:
            regions.add(Region.PAST, value, last, target)
            if t == block.stop:
                regions.near_past.append((value > 0, b, t))
        elif t >= block.start:
            regions.add(Region.SELF, value, target, target)
        else:
            regions.add(Region.FUTURE, value, first, target)
            if at.trained[b, t]:
                _count(regions.trained_future, value, first, target)


def add_padding(regions: Regions, at: Positions, change_BT: NDArray[np.float64]) -> None:
    """Changes at real positions after every PAD token was replaced."""
    import numpy as np

    for b in range(at.ids.shape[0]):
        pads = np.flatnonzero(at.padding[b])
        if not len(pads):
            continue
        for t in (int(i) for i in np.flatnonzero(at.real[b])):
            nearest = int(pads[np.abs(pads - t).argmin()])
            regions.add(Region.PADDING, float(change_BT[b, t]), (b, nearest), (b, t))


def add_gradient(regions: Regions, at: Positions, norm_BT: NDArray[np.float64], targets: list[tuple[int, int]]) -> None:
    """Sort |d H[target] / d embedding[s]| of one target an example; examples without a target count as other examples.

    What is not finite (a NaN of the backward, a root at zero) says nothing about who sees whom and is not counted.
    """
    import numpy as np

    by_example = dict(targets)
    for b in range(at.ids.shape[0]):
        t = by_example.get(b)
        finite = np.isfinite(norm_BT[b])
        for s in (finite & (at.real[b] | at.padding[b])).nonzero()[0].tolist():
            value = float(norm_BT[b, s])
            if t is not None:
                _add_source(regions, at, value, (b, s), (b, t))
            elif at.real[b, s]:
                regions.add(Region.OTHER_EXAMPLE, value, (b, s), targets[0])
        past = None if t is None else at.real[b, :t] & (at.document[b, :t] == at.document[b, t])
        if t is not None and past is not None and past.any():
            regions.near_past.append((bool((norm_BT[b, :t][past] > 0).any()), b, t))


def _add_source(regions: Regions, at: Positions, value: float, source: tuple[int, int], target: tuple[int, int]) -> None:
    s, t = source[1], target[1]
    if at.padding[source]:
        regions.add(Region.PADDING, value, source, target)
    elif at.document[source] != at.document[target]:
        regions.add(Region.OTHER_DOCUMENT, value, source, target)
    elif s <= t:
        regions.add(Region.SELF if s == t else Region.PAST, value, source, target)
    else:
        regions.add(Region.FUTURE, value, source, target)
        if at.trained[target]:
            _count(regions.trained_future, value, source, target)
