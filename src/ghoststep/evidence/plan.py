"""What the user declared about the training to come."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ghoststep.evidence.base import Evidence


class TrainingKind(enum.Enum):
    """Which parameters will be trained, and on what (`--training`)."""

    FULL = "full"
    """Every parameter, the embedding tables included."""
    LORA = "lora"
    """Adapters only; the embedding tables are frozen."""
    FROZEN_EMBEDDINGS = "frozen-embeddings"
    """Everything but the embedding tables."""
    RL = "rl"
    """Every parameter, on prompts written by the chat template and on the model's own rollouts."""

    @property
    def trains_tables(self) -> bool:
        """True if the embedding tables receive gradients."""
        return self in (TrainingKind.FULL, TrainingKind.RL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan(Evidence):
    """The declared training. `training_declared` is False when the default was taken."""

    training: TrainingKind = TrainingKind.FULL
    training_declared: bool = False
    seed: int = 0
