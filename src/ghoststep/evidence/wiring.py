"""Facts about how a model is put together, as far as files show it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ghoststep.evidence.base import Evidence


class Mixing(enum.Enum):
    """How information moves between positions. This decides where a near-zero input row amplifies gradients."""

    RECURRENT_GATED = "recurrent-gated"
    """At least one layer mixes positions only through a recurrence or gate: amplifies at any position."""
    ATTENTION_BESIDE = "recurrent-gated with attention beside it"
    """Every recurrent layer has attention in parallel (Falcon-H1): amplifies at the first visible position only."""
    ATTENTION = "attention"
    """Attention only: amplifies at the first visible position only."""


class Tie(enum.Enum):
    """Whether input embedding and output head are one table."""

    TIED = "tied"
    UNTIED = "untied"
    BROKEN_FLAG_TRUE = "declared tied, stored as two different tables"
    BROKEN_HEAD_MISSING = "declared untied, head not stored"
    DRIFTING = "declared tied, two equal tables that train apart"
    """Only a live model shows this: equal now, in separate storage, and at least one of them is trained."""
    NO_HEAD = "no output head"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingClass(Evidence):
    """The class with the config keys and parameter names that prove it. Counts are layers.

    `causal` is False for encoders, True for decoders, None where files do not say. `is_encoder_decoder` is True for a text encoder
    (or one of sound or images) whose output a decoder attends to: `causal` is then None, since every position of the encoder,
    the first one too, sees all others, while the decoder is causal.
    `lifted_by_positions` is True when learned absolute positions are added to the embedding (GPT-2: never amplifies).
    """

    mixing: Mixing
    reason: str
    num_recurrent_layers: int | None = None
    num_attention_layers: int | None = None
    causal: bool | None = None
    lifted_by_positions: bool = False
    is_encoder_decoder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TieState(Evidence):
    """Flag × tensors × equality. `num_different_rows` counts rows where two stored tables differ (0 if equal, None if one).

    It is also None where counting stopped at the first difference, because the flag does not claim that they are equal.

    `declared` is the flag (None: not in the config, or the model's class ignores it). `first_different_row` is the lowest
    differing row. `num_trainable_tables` counts the tables that a live model trains (None from files).
    """

    tie: Tie
    reason: str
    declared: bool | None
    num_different_rows: int | None = None
    first_different_row: int | None = None
    num_trainable_tables: int | None = None
