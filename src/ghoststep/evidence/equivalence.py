"""Facts about what should make no difference: padding and its side, the batch around a text, the pack, the attention
implementation, an all-ones mask, the cache; and where a pooled vector is taken from."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ghoststep.evidence.base import Evidence


class Variant(enum.Enum):
    """Another way to run the same text, compared with the text alone."""

    AS_BATCHED = "as it stands in the batch"
    LEFT = "padded on the left"
    RIGHT = "padded on the right"
    OTHER_BATCH = "in another order of the batch"
    PACKED = "packed behind other documents"
    ATTENTION = "with another attention implementation"
    NO_MASK = "without the attention mask"
    MASK = "with a mask of ones"
    CACHED = "token by token with a cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantReading:
    """How far hidden states of real tokens move under one variant.

    change: largest L2 change of a real position's hidden state over the typical norm (0 exact). tolerance: what another shape
    alone may cause in this dtype; in bfloat16 and float16 a larger change counts only if a float32 copy of the weights moves as
    well. (example, position) has the largest change; num_above of num_positions exceed the tolerance.
    starts_move: the first real position of an example moves too, as it does when positions or visible padding are at fault;
    where only later ones do, a discrete choice (routing by capacity, chunks) may.
    used_by: what uses this variant ("the batch", "the tokenizer", "training"), or "" if nothing of the setup does.
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
class OtherBatch(Evidence):
    """Up to two examples alone against up to four examples in another order, all as wide as the batch, in eval mode."""

    reading: VariantReading
    num_forward: float
    reasons: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed(Evidence):
    """Up to two documents of an announced pack against the same documents alone. `source`: what announces the pack; `document`:
    the number of the one with the largest change; has_position_ids: the batch passes positions."""

    reading: VariantReading
    source: str
    document: int
    has_position_ids: bool
    num_forward: float
    reasons: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherAttention(Evidence):
    """One example as it stands in the batch with the attention implementation in use against another one of the model.

    used / other: their names. outvoted: the two usual implementations agree with one another, and the one in use with neither.
    own_mask: the call passes a mask of three or more dimensions, which is of one implementation's dialect.
    """

    reading: VariantReading
    used: str
    other: str
    outvoted: bool
    own_mask: bool
    num_forward: float
    reasons: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherMask(Evidence):
    """One unpadded example with and without an attention mask of ones. `generates`: the model has a generation of its own, which
    always passes one; has_mask: the batch passes a mask."""

    reading: VariantReading
    has_mask: bool
    generates: bool
    num_forward: float
    reasons: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached(Evidence):
    """The last tokens of one example by the model's own generation with its cache, against one forward over the whole example.

    num_prompt tokens were given at once, the others one by one. is_default: this is what the model's generation does unasked.
    """

    reading: VariantReading
    num_prompt: int
    is_default: bool
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
