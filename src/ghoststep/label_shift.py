"""Which token of the batch each position is trained to predict: its own, the next, the one after. Pure, shared by GS2 checks.

B examples, T positions. An offset s means: the target of position t is the token at t + s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.loss import FurtherTarget, LossKind, LossXray

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

OFFSETS = (0, 1, 2)
MIN_COUNTING = 8
MIN_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """How often the target is the token at t + s, over the positions where these tokens differ (`num_counting`).

    offset: the s that most positions agree on, or None (labels that are no tokens of the batch, or too few positions).
    first: (example, position) of the first position with that offset.
    """

    matches: tuple[int, int, int]
    num_counting: int
    offset: int | None
    first: tuple[int, int] | None

    def share(self, offset: int) -> float:
        """Part of the counting positions whose target is the token at t + offset; 0 without any."""
        return self.matches[offset] / self.num_counting if self.num_counting else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One position that carries loss: `source` is the position of the token it predicts, None outside the example."""

    example: int
    position: int
    source: int | None
    target: int
    weight: float


def measure_shift(xray: LossXray | FurtherTarget, batch: BatchFacts) -> Shift:
    """Compare targets with the tokens around them. Positions where the candidates coincide tell nothing and do not count."""
    matches, counting = [0, 0, 0], 0
    firsts: list[tuple[int, int] | None] = [None, None, None]
    examples = zip(
        xray.target_BT.tolist(), xray.weight_BT.tolist(), xray.ambiguous_BT.tolist(), batch.ids_BT.tolist(), strict=True
    )
    for b, (targets, weights, ambiguous, ids) in enumerate(examples):
        for t in range(len(ids) - 1):
            near = ids[t : t + 3]
            if weights[t] == 0 or ambiguous[t] or len(set(near)) < len(near):
                continue
            counting += 1
            for s in range(len(near)):
                if targets[t] == near[s]:
                    matches[s] += 1
                    firsts[s] = firsts[s] or (b, t)
    best = max(OFFSETS, key=lambda s: matches[s])
    offset = best if counting >= MIN_COUNTING and matches[best] >= MIN_SHARE * counting else None
    return Shift(
        matches=(matches[0], matches[1], matches[2]), num_counting=counting, offset=offset,
        first=None if offset is None else firsts[offset],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """How many of `num_counting` trained positions point at one place beside them; `first` is the first of these."""

    matches: int
    num_counting: int
    first: tuple[int, int] | None
    token: int = -1

    def is_most(self, minimum_share: float = MIN_SHARE) -> bool:
        """True if enough positions count and this part of them agrees."""
        return (
            self.first is not None and self.num_counting >= MIN_COUNTING and self.matches >= minimum_share * self.num_counting
        )


def points_back(xray: LossXray, batch: BatchFacts) -> Beside:
    """Positions t whose target is the token at t - 1. Only those count where it differs from the tokens at t and t + 1."""
    matches, counting, first, token = 0, 0, None, -1
    ids_of, ambiguous = batch.ids_BT.tolist(), xray.ambiguous_BT.tolist()
    for c in counted(xray, 0):
        ids, t = ids_of[c.example], c.position
        if t == 0 or ambiguous[c.example][t] or ids[t - 1] in ids[t : t + 2]:
            continue
        counting += 1
        if c.target == ids[t - 1]:
            matches += 1
            if first is None:
                first, token = (c.example, t), c.target
    return Beside(matches=matches, num_counting=counting, first=first, token=token)


def beside_masks(xray: LossXray, batch: BatchFacts, step: int) -> Beside:
    """Trained positions t with one and the same token (a mask token) at t + step, which is neither at t nor the target.

    token: that token. Zero matches where it also stands at a third of the trained positions themselves.
    """
    ids_of, seen = batch.ids_BT.tolist(), []
    for c in counted(xray, 0):
        ids, t = ids_of[c.example], c.position
        if 0 <= t + step < len(ids):
            seen.append((ids[t + step], ids[t], c))
    if not seen:
        return Beside(matches=0, num_counting=0, first=None)
    neighbours = [n for n, _, _ in seen]
    token = max(set(neighbours), key=neighbours.count)
    hits = [c for n, own, c in seen if n == token and token not in (own, c.target)]
    if 3 * sum(own == token for _, own, _ in seen) > len(seen):
        hits = []
    first = (hits[0].example, hits[0].position) if hits else None
    return Beside(matches=len(hits), num_counting=len(seen), first=first, token=token)


def all_shifts(xray: LossXray, batch: BatchFacts) -> list[Shift]:
    """The shift of the main target, then of each further one."""
    return [measure_shift(xray, batch), *(measure_shift(target, batch) for target in xray.further)]


def likely_offset(shift: Shift, batch: BatchFacts) -> int:
    """The measured offset; where too few positions count to measure it, 1 (the next token), or 0 for masked models."""
    if shift.offset is not None:
        return shift.offset
    return 0 if batch.intent == "masked" else 1


def counted(xray: LossXray | FurtherTarget, offset: int) -> Iterator[Counted]:
    """Every position with a weight, in order."""
    for b, (targets, weights) in enumerate(zip(xray.target_BT.tolist(), xray.weight_BT.tolist(), strict=True)):
        for t, (target, weight) in enumerate(zip(targets, weights, strict=True)):
            if weight != 0:
                source = t + offset if t + offset < len(targets) else None
                yield Counted(example=b, position=t, source=source, target=target, weight=weight)


def no_answer(xray: LossXray, *, signed: bool = False) -> str | None:
    """Why labels cannot be judged under this loss, or None. `signed` accepts policy gradients and preferences."""
    if xray.kind.is_likelihood or (signed and xray.kind is LossKind.POLICY):
        return None
    if xray.kind is LossKind.NOTHING:
        return "no position carries loss (see nothing-supervised)"
    extra = f" (residual {xray.residual:.2g})" if xray.kind is LossKind.OTHER else ""
    return f"the loss is {xray.kind.value}{extra}: its gradient does not name labels"


def too_few(shift: Shift) -> str:
    """The reason of an unknown verdict when under `MIN_COUNTING` positions count."""
    return (
        f"only {shift.num_counting} positions have a target and different tokens at t, t+1 and t+2; "
        f"{MIN_COUNTING} are needed to tell them apart"
    )


def at(matrix: NDArray[np.float64], source: int, target: int) -> float:
    """One cell of an influence matrix; NaN outside of it."""
    inside = 0 <= source < matrix.shape[0] and 0 <= target < matrix.shape[1]
    return float(matrix[source, target]) if inside else float("nan")
