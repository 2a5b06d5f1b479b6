"""Is a trained position meant to be blind to later tokens? Said by the setup, the loss, the model's config or the labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.influence import CausalIntent
from ghoststep.evidence.loss import LossKind, LossXray
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_DECLARED = {"causal": True, "rl": True, "prefix": True, "seq2seq": True, "masked": False, "contrastive": False}
_HARD = (LossKind.HARD, LossKind.SMOOTHED, LossKind.WEIGHTED)
MIN_COUNTING = 8
"""Trained positions needed before their targets say anything."""

MAX_RESIDUAL = 0.05
"""Distance from a cross-entropy from which a loss's targets say nothing."""


def causal_intent(
    setup: Setup, call: LiveCall, ids_BT: NDArray[np.int64], batch: BatchFacts | Missing, xray: LossXray | Missing
) -> CausalIntent:
    """In this order: the setup's intent; the targets that the loss pulls towards; the model's class and config; the labels.

    A declared prefix-LM, encoder-decoder or policy is causal on the positions that it trains.
    """
    if setup.intent in _DECLARED:
        return CausalIntent(causal=_DECLARED[setup.intent], source=f"the setup's intent is {setup.intent!r}")
    if isinstance(xray, LossXray):
        # The probed call's ids, or those of all calls where the loss makes several.
        candidates = [ids_BT, *([batch.ids_BT] if isinstance(batch, BatchFacts) else [])]
        ids = next((i for i in candidates if i.shape == xray.target_BT.shape), None)
        said = None if ids is None else _by_targets(ids, xray)
        if said is not None:
            return said
    said = _by_declaration(call.core)
    if said is not None:
        return said
    if _is_pooled(call, xray):
        return CausalIntent(causal=False, source="no position has logits of its own: nothing is trained to predict a token")
    if isinstance(batch, BatchFacts) and batch.labels_BT is not None and isinstance(xray, Missing):
        said = _by_labels(batch.ids_BT, batch.labels_BT)
        if said is not None:
            return said
    return CausalIntent(causal=None, source="neither loss, labels, config nor the setup's `intent` says what is trained")


def _is_pooled(call: LiveCall, xray: LossXray | Missing) -> bool:
    """No head ran, and what the model returns has no position: [examples, dimensions] or nothing like logits."""
    if isinstance(xray, LossXray) and xray.kind is LossKind.CONTRASTIVE:
        return True
    return returns_vectors(call) or (call.head is None and call.logits is None)


def returns_vectors(call: LiveCall) -> bool:
    """The model returns [examples, dimensions]: one vector an example, none a position."""
    positions = {int(i.numel()) for i in call.ids}
    return call.logits is not None and call.logits.dim() == 2 and call.logits.shape[0] not in positions


def _by_targets(ids_BT: NDArray[np.int64], xray: LossXray) -> CausalIntent | None:
    import numpy as np

    if not xray.residual <= MAX_RESIDUAL:
        return None
    trained = (np.nan_to_num(xray.weight_BT) != 0) & ~xray.ambiguous_BT
    total = int(trained.sum())
    if total < MIN_COUNTING:
        return None
    for step in (1, 2):
        later = np.full(ids_BT.shape, -2, dtype=np.int64)
        later[:, :-step] = ids_BT[:, step:]
        clear = trained & (later != ids_BT)
        hits = int((clear & (xray.target_BT == later)).sum())
        if hits > 0.5 * max(int(clear.sum()), 1) and hits >= MIN_COUNTING:
            what = "the next token" if step == 1 else f"the token {step} ahead"
            return CausalIntent(causal=True, source=f"{hits} of {int(clear.sum())} trained positions are to predict {what}")
    if xray.kind in _HARD and int((trained & (xray.target_BT == ids_BT)).sum()) < 0.5 * total:
        return CausalIntent(causal=False, source="the trained positions are not to predict a later token of the input")
    return None


def _by_declaration(core: Any) -> CausalIntent | None:
    base = core.get_base_model() if hasattr(core, "get_base_model") else core
    config = getattr(base, "config", None)
    name = type(base).__name__
    if getattr(config, "is_encoder_decoder", False) is True or getattr(config, "is_decoder", False) is True:
        return CausalIntent(causal=True, source="the config declares a decoder")
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return CausalIntent(causal=True, source=f"the model's class is {name}")
    if name.endswith(("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification", "ForPreTraining")):
        return CausalIntent(causal=False, source=f"the model's class is {name}")
    return None


def _by_labels(ids_BT: NDArray[np.int64], labels_BT: NDArray[np.int64]) -> CausalIntent | None:
    if labels_BT.shape != ids_BT.shape:
        return None
    given = labels_BT >= 0
    total = int(given.sum())
    if total < MIN_COUNTING:
        return None
    if int((given & (labels_BT == ids_BT)).sum()) > 0.9 * total:
        return CausalIntent(causal=True, source="the labels are the input ids themselves")
    shifted = given[:, :-1] & (labels_BT[:, :-1] == ids_BT[:, 1:])
    if int(shifted.sum()) > 0.5 * total:
        return CausalIntent(causal=True, source="the labels are the next input ids")
    return CausalIntent(causal=False, source="the labels are not the input's next tokens")
