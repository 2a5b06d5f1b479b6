"""Facts about what the loss really trains on. B examples, T positions, V classes, N counted positions."""

from __future__ import annotations

import enum
import math
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
class FurtherTarget:
    """A second target of the same positions: another head, or another call of it (multi-token prediction). As in `LossXray`."""

    target_BT: NDArray[np.int64]
    weight_BT: NDArray[np.float64]
    target_probability_BT: NDArray[np.float64]
    ambiguous_BT: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossXray(Evidence):
    """Per position of the first batch: which class it is trained towards and with what weight, from d loss / d logits.

    Positions are those of `BatchFacts.ids_BT`.
    target_BT: int64 class with the largest target probability, -1 where the position carries no loss.
    weight_BT: float64 signed weight of the position in the loss (a mean over N tokens gives 1/N each); 0 where none.
    target_probability_BT: float64 target mass of `target_BT` (1 hard, 0.9 smoothed, NaN where unknown).
    residual: how far the loss is from a cross-entropy with these weights and targets (0 exact; > 0.05 not one).
    ambiguous_BT: bool, the label could not be told from others (identical head rows, equal gradients): such positions do not count.
    kind: see `LossKind`. reading: which recipe ("log-softmax node", "fed logits", "fed hidden states", "fed embeddings").
    loss: the user's own loss value on the model's own logits (float; NaN and infinities kept). num_classes: V as the loss sees it.
    num_head_calls: calls of the head. further: targets of further heads over the same positions.
    masked_classes: number of classes whose logit was -inf or cut off before the loss. smoothing_on_masked: target mass there.
    first_masked_class: the lowest of them, -1 if none. num_nonfinite: positions whose gradient is NaN or infinite.
    num_forward: forward passes that were run. log_odds_reached: where a softmax stands before the log-softmax of the loss, the
    largest difference of log-probabilities that logits of 1e4 reach there (infinite where none does). mixed_positions: from how
    many positions the classes of one row of the loss's softmax were taken, where they changed places on the way (0: they did not).
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
    first_masked_class: int = -1
    num_nonfinite: int = 0
    further: tuple[FurtherTarget, ...] = ()
    num_forward: int = 0
    log_odds_reached: float = math.inf
    mixed_positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightAcrossMicroBatches(Evidence):
    """The weight of one token in each micro-batch of an accumulation window (or batch), and how many tokens each had.

    weights: mean weight of a counted token, one a micro-batch. num_tokens: counted tokens, one a micro-batch.
    accumulation_steps: micro-batches an optimizer step, as the setup declares.
    counted_weights: the same weights when the model is handed the window's number of tokens as `num_items_in_batch`, as
        transformers' Trainer does; empty where the loss is the setup's own, the model takes no such number, or the batch has one.
    all_trained: every position but the first or last of each example carries loss, so that the counts are equal by construction.
    """

    weights: tuple[float, ...]
    num_tokens: tuple[int, ...]
    accumulation_steps: int = 1
    counted_weights: tuple[float, ...] = ()
    all_trained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenTrial(Evidence):
    """The first batch once more, with half of the labels of one example left out, where all examples have equally many.

    example: the one. num_tokens: its counted tokens now; num_others: those of each other example. ratio: the weight of one of its
    tokens over that of one of the others (1: a mean over tokens, or a sum).
    """

    example: int
    num_tokens: int
    num_others: int
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMass(Evidence):
    """How much probability the model's own softmax gives to classes that no token of the tokenizer stands for.

    num_classes: V of the logits; num_tokens: ids of the tokenizer below V. first_class / last_class: of those without a token.
    mass: mean over supervised positions (all real ones if none is known), 0..1. uniform_mass: their share of the classes.
    top_class, top_mass: the one of them with the largest mean probability. mean_loss: mean negative log-likelihood of the
    targets in nats (NaN if unknown). real_loss: the same after leaving these classes out. num_positions: positions averaged over.
    """

    num_classes: int
    num_tokens: int
    first_class: int
    last_class: int
    num_without_token: int
    mass: float
    uniform_mass: float
    top_class: int
    top_mass: float
    mean_loss: float
    real_loss: float
    num_positions: int
