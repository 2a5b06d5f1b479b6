"""Facts for pictures, made by hand."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.influence import CausalIntent, Influence
from ghoststep.evidence.loss import LossKind, LossXray


def influence(
    matrix_ST: NDArray[np.float64], *, causal: bool | None = True, floor: float = 1e-6, example: int = 0
) -> Influence:
    """Only what a picture reads is set; the other facts are empty."""
    read: dict[str, Any] = {
        "matrix_ST": matrix_ST,
        "matrix_example": example,
        "intent": CausalIntent(causal=causal, source="made by hand"),
        "floor": floor,
        "mode": "train",
    }
    others: dict[str, Any] = {f.name: None for f in fields(Influence) if f.name not in read}
    return Influence(**read, **others)


def decoder(num_positions: int, seed: int = 0) -> NDArray[np.float64]:
    """[source, target]: a healthy decoder's influence, the past and itself only."""
    made = np.triu(10 ** np.random.default_rng(seed).uniform(-2.9, 0.5, (num_positions, num_positions)))
    return np.asarray(made, dtype=np.float64)


def batch(
    ids_BT: NDArray[np.int64], padding_BT: NDArray[np.bool_] | None = None, document_BT: NDArray[np.int64] | None = None
) -> BatchFacts:
    return BatchFacts(
        ids_BT=ids_BT,
        padding_BT=padding_BT,
        padding_source="attention_mask",
        document_BT=document_BT,
        document_source="position_ids",
        labels_BT=None,
        sides="right",
        has_attention_mask=True,
        has_position_ids=False,
    )


def xray(target_BT: NDArray[np.int64], weight_BT: NDArray[np.float64]) -> LossXray:
    return LossXray(
        target_BT=target_BT,
        weight_BT=weight_BT,
        target_probability_BT=np.ones(target_BT.shape),
        residual=0.0,
        ambiguous_BT=np.zeros(target_BT.shape, dtype=bool),
        kind=LossKind.HARD,
        reading="fed logits",
        loss=3.25,
        num_classes=100,
        num_head_calls=1,
    )
