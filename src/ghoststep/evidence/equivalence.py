"""Facts about what should make no difference: padding and its side, and where a pooled vector is taken from."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ghoststep.evidence.base import Evidence


class Variant(enum.Enum):
    """Another way to run the same text, compared with the text alone and unpadded."""

    AS_BATCHED = "as it stands in the batch"
    LEFT = "padded on the left"
    RIGHT = "padded on the right"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantReading:
    """How far hidden states of real tokens move under one variant.

    change: largest L2 change of a real position's hidden state over the typical norm (0 exact). tolerance: what another shape
    alone may cause in this dtype. (example, position) has the largest change; num_above of num_positions exceed the tolerance.
    starts_move: the first real position of an example moves too, as it does when positions or visible padding are at fault;
    where only later ones do, a discrete choice (routing by capacity, chunks) may.
    used_by: what uses this variant ("the batch", "the tokenizer"), or "" if nothing of the setup does.
    """

    variant: Variant
    change: float
    tolerance: float
    example: int
    position: int
    num_positions: int
    num_above: int
    starts_move: bool
    used_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence(Evidence):
    """What was compared in eval mode. `side`: where the batch's padding stands. num_forward: passes over the whole batch."""

    readings: tuple[VariantReading, ...]
    side: str
    has_position_ids: bool
    num_forward: float
    reasons: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledExample:
    """Which positions of one example the loss reads. `kind`: "single", "mean" (equal or proportional gradients) or "maximum".

    num_used positions carry gradient, num_padding of them are PAD. position: the one read, or the first PAD among them, or -1.
    last_real / first_real: where the real tokens stand.
    """

    example: int
    kind: str
    num_used: int
    num_padding: int
    position: int
    first_real: int
    last_real: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling(Evidence):
    """How the loss makes one vector of an example: one entry an example that has padding. `side` as in `BatchFacts`."""

    examples: tuple[PooledExample, ...]
    num_examples: int
    padding_source: str
    num_forward: int
