"""Facts about what the loss really trains on. B examples, T positions, V classes, N counted positions."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.evidence.base import Evidence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class LossKind(enum.Enum):
    """What the loss is, by its gradients alone."""

    HARD = "likelihood, hard labels"
    SMOOTHED = "likelihood, smoothed labels"
    WEIGHTED = "likelihood, weighted positions"
    SOFT = "likelihood, soft targets"
    POLICY = "policy gradient or preference (signed weights)"
    CONTRASTIVE = "contrastive"
    OTHER = "not a plain cross-entropy"
    NOTHING = "no position carries loss"

    @property
    def is_likelihood(self) -> bool:
        """True where label checks mean something."""
        return self in (LossKind.HARD, LossKind.SMOOTHED, LossKind.WEIGHTED, LossKind.SOFT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossXray(Evidence):
    """Per position of the first batch: which class it is trained towards and with what weight, from d loss / d logits.

    target_BT: int64 class with the largest target probability, -1 where the position carries no loss.
    weight_BT: float64 signed weight of the position in the loss (a mean over N tokens gives 1/N each); 0 where none.
    target_probability_BT: float64 target mass of `target_BT` (1 hard, 0.9 smoothed, NaN where unknown).
    residual: how far the loss is from a cross-entropy with these weights and targets (0 exact; > 0.05 not one).
    ambiguous_BT: bool, the label could not be told from others (identical head rows, equal gradients): such positions do not count.
    kind: see `LossKind`. reading: which recipe ("fed logits", "log-softmax node", "fed hidden states", "fed embeddings").
    loss: the user's own loss value (float; may be NaN). num_classes: V as the loss sees it. num_head_calls: calls of the head.
    masked_classes: number of classes whose logit was -inf or cut off before the loss. smoothing_on_masked: target mass there.
    """

    target_BT: NDArray[np.int64]
    weight_BT: NDArray[np.float64]
    target_probability_BT: NDArray[np.float64]
    residual: float
    ambiguous_BT: NDArray[np.bool_]
    kind: LossKind
    reading: str
    loss: float
    num_classes: int
    num_head_calls: int
    masked_classes: int = 0
    smoothing_on_masked: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightAcrossMicroBatches(Evidence):
    """The weight of one token in each micro-batch of an accumulation window (or batch), and how many tokens each had.

    weights: mean weight of a counted token, one a micro-batch. num_tokens: counted tokens, one a micro-batch.
    """

    weights: tuple[float, ...]
    num_tokens: tuple[int, ...]
