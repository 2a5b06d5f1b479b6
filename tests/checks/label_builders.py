"""Evidence about batches and losses built by hand, for the checks of the GS2 family. B examples, T positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.influence import CausalIntent, Influence
from ghoststep.evidence.loss import FurtherTarget, LossKind, LossXray

IDS = (tuple(range(10, 22)), tuple(range(30, 42)))


def batch(ids: Sequence[Sequence[int]] = IDS, **more: Any) -> BatchFacts:
    values: dict[str, Any] = {
        "ids_BT": np.array(ids, dtype=np.int64),
        "padding_BT": np.zeros(np.shape(ids), dtype=bool),
        "padding_source": "attention_mask",
        "document_BT": None,
        "document_source": "nothing announces documents",
        "labels_BT": None,
        "sides": "none",
        "has_attention_mask": True,
        "has_position_ids": False,
        "eos_ids": (2,),
        **more,
    }
    return BatchFacts(**values)


def right_padded(ids: Sequence[Sequence[int]], lengths: Sequence[int], **more: Any) -> BatchFacts:
    padding = np.arange(np.shape(ids)[1])[None] >= np.array(lengths)[:, None]
    return batch(ids, padding_BT=padding, sides="right", **more)


def targets(ids: Sequence[Sequence[int]] = IDS, shift: int = 1, without: Sequence[tuple[int, int]] = ()) -> Any:
    """The token `shift` ahead at each position; -1 at the end and where the token itself (example, position) is left out."""
    ids_BT = np.array(ids, dtype=np.int64)
    found = np.full(ids_BT.shape, -1, dtype=np.int64)
    width = ids_BT.shape[1] - shift
    found[:, :width] = ids_BT[:, shift:]
    for example, position in without:
        if position >= shift:
            found[example, position - shift] = -1
    return found


def xray(target_BT: Any = None, weight_BT: Any = None, **more: Any) -> LossXray:
    target_BT = targets() if target_BT is None else np.asarray(target_BT)
    counted = target_BT >= 0
    if weight_BT is None:
        weight_BT = counted / max(1, counted.sum())
    values: dict[str, Any] = {
        "target_BT": target_BT,
        "weight_BT": np.asarray(weight_BT, dtype=np.float64),
        "target_probability_BT": np.where(counted, 1.0, np.nan),
        "residual": 0.0,
        "ambiguous_BT": np.zeros(target_BT.shape, dtype=bool),
        "kind": LossKind.HARD if counted.any() else LossKind.NOTHING,
        "reading": "log-softmax node",
        "loss": 3.0,
        "num_classes": 64,
        "num_head_calls": 1,
        **more,
    }
    return LossXray(**values)


def further(target_BT: Any) -> FurtherTarget:
    other = xray(target_BT)
    return FurtherTarget(
        target_BT=other.target_BT,
        weight_BT=other.weight_BT,
        target_probability_BT=other.target_probability_BT,
        ambiguous_BT=other.ambiguous_BT,
    )


def influence(matrix_ST: Any = None, *, causal: bool = True, **more: Any) -> Influence:
    """Of example 0: by default every position sees itself and its past."""
    length = len(IDS[0])
    if matrix_ST is None:
        matrix_ST = np.triu(np.ones((length, length)))
    values: dict[str, Any] = {
        "matrix_ST": np.asarray(matrix_ST, dtype=np.float64),
        "matrix_example": 0,
        "readings": {},
        "gradient_readings": {},
        "trained_future": None,
        "trained_future_gradient": None,
        "intent": CausalIntent(causal=None, source="built"),
        "floor": 1e-6,
        "past": 0.1,
        "num_past": 8,
        "near_past": (8, 8),
        "blind_example": None,
        "order_change": None,
        "order_floor": 0.0,
        "has_attention": True,
        "probes_perturbed": False,
        "nothing_visible": (),
        "is_causal_by_measure": causal,
        "coupled": "",
        "mode": "train",
        "serial": False,
        "readout": "head input",
        "num_examples": 2,
        "num_forward": 1,
        "num_backward": 0,
        **more,
    }
    missing = [f.name for f in dataclasses.fields(Influence) if f.default is f.default_factory is dataclasses.MISSING]
    return Influence(**{**dict.fromkeys(missing), **values})
