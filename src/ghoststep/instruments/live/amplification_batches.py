"""Batches made for an amplification sweep where the user gives none: causal language models of transformers. T positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, UsageError
from ghoststep.evidence.amplification import FIRST, LEFT, MIDDLE, PACKED
from ghoststep.instruments.live.untouched import untouched

if TYPE_CHECKING:
    import torch

LENGTH, NUM_EXAMPLES, START = 16, 2, 8
ORDINARY = 0.1
"""Share of the median norm that a row must have for its id to be drawn."""

Made = tuple[tuple[str, ...], Callable[[], dict[str, Any]]]


def made_batches(model: torch.nn.Module, seed: int) -> Sequence[Made]:
    """(places, function that makes the batch with them). The functions raise `CannotLook` where the model takes no such batch.

    `UsageError` for a model without a vocabulary size in its config or without an input embedding.
    """
    config = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    size = getattr(config, "vocab_size", None)
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(size, int) or embedding is None or getattr(config, "is_encoder_decoder", False):
        raise UsageError("batch is missing; one can be made for a causal language model of transformers only: give batch=...")
    ids = _ids(embedding.weight, config, size, seed)
    return (
        ((FIRST, MIDDLE), lambda: _plain(ids)),
        ((PACKED,), lambda: _packed(model, ids)),
        ((LEFT,), lambda: _left_padded(ids, config)),
    )


def _ids(weight: torch.Tensor, config: Any, size: int, seed: int) -> torch.Tensor:
    """Ordinary ids: no special token of the config, no small row."""
    import torch

    norms_R = weight.detach().float().norm(dim=1)[:size].cpu()
    ordinary_R = norms_R >= ORDINARY * norms_R.median()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        for i in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(i, int) and 0 <= i < len(ordinary_R):
                ordinary_R[i] = False
    candidates = ordinary_R.nonzero()[:, 0]
    if not len(candidates):
        raise CannotLook("no row of the table is ordinary, so no batch can be made")
    chosen = torch.randint(len(candidates), (NUM_EXAMPLES, LENGTH), generator=torch.Generator().manual_seed(seed))
    ids: torch.Tensor = candidates[chosen]
    return ids.to(weight.device)


def _plain(ids: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "labels": ids.clone()}


def _left_padded(ids: torch.Tensor, config: Any) -> dict[str, Any]:
    import torch

    pad, quarter = getattr(config, "pad_token_id", None), LENGTH // 4
    ids, mask = ids.clone(), torch.ones_like(ids)
    mask[1, :quarter] = 0
    ids[1, :quarter] = pad if isinstance(pad, int) and pad >= 0 else 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _packed(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, Any]:
    """Two documents in each example. `CannotLook` unless the model really keeps them apart: then the second one's logits do not move
    with the first one's tokens."""
    import torch

    position_T = torch.arange(LENGTH, device=ids.device)
    document_T = (position_T >= START).long()
    visible_TT = (document_T[:, None] == document_T[None, :]) & (position_T[:, None] >= position_T[None, :])
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    mask_TT = torch.zeros(LENGTH, LENGTH, dtype=kind, device=ids.device).masked_fill(~visible_TT, torch.finfo(kind).min)
    labels = ids.clone()
    labels[:, START] = -100
    batch = {
        "input_ids": ids, "labels": labels, "attention_mask": mask_TT.expand(len(ids), 1, LENGTH, LENGTH).clone(),
        "position_ids": (position_T % START).expand_as(ids).clone(),
    }  # fmt: skip
    other = ids.clone()
    other[:, :START] = ids[:, :START].flip(1).roll(1, dims=0)
    try:
        with untouched(model), torch.no_grad():
            model.eval()
            one, two = (model(**{**batch, "input_ids": i}).logits[:, START:] for i in (ids, other))
    except Exception as error:
        text = " ".join(str(error).split())[:120]
        raise CannotLook(f"the model takes no block-diagonal mask ({type(error).__name__}: {text})") from error
    if not torch.equal(one, two):
        raise CannotLook("the model does not keep packed documents apart by a block-diagonal mask and restarting positions")
    return batch
