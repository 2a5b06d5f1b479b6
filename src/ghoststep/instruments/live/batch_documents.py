"""Which documents a batch announces inside its examples. B examples, T positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SEGMENT_NAMES = ("seq_idx", "document_ids", "doc_ids", "document_id", "segment_ids", "sequence_ids", "sequence_id", "seq_ids")
_LENGTH_NAMES = ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q", "cu_seq_lens")


def announced_documents(entries: Mapping[str, torch.Tensor], ids: torch.Tensor) -> tuple[torch.Tensor | None, str]:
    """The number of the document of each position [B, T], and what announces it; (None, reason) if nothing does."""
    mask = entries.get("attention_mask")
    for name in _SEGMENT_NAMES:
        value = entries.get(name)
        if value is not None and value.shape == ids.shape and not value.is_floating_point():
            return _numbered(_changes(value)), name
    for name in _LENGTH_NAMES:
        value = entries.get(name)
        if value is not None and value.dim() == 1 and int(value[-1]) == ids.numel():
            return _from_lengths(value, ids), name
    if mask is not None and mask.dim() == 2 and mask.shape == ids.shape and int(mask.max()) > 1:
        return _numbered(_changes(mask)), "attention_mask numbers the documents"
    positions = entries.get("position_ids")
    if positions is not None and positions.dim() == 2 and positions.shape[-1] == ids.shape[-1]:
        real = mask != 0 if mask is not None and mask.shape == ids.shape else None
        return _from_positions(positions.expand_as(ids), real), "position_ids restart"
    if mask is not None and mask.dim() in (3, 4) and mask.shape[-1] == mask.shape[-2] == ids.shape[-1]:
        return _from_square_mask(mask, ids), "the attention mask is block-diagonal"
    return None, "nothing in the batch announces documents"


def _changes(value: torch.Tensor) -> torch.Tensor:
    import torch

    starts = torch.zeros(value.shape, dtype=torch.bool)
    starts[:, 1:] = (value[:, 1:] != value[:, :-1]).cpu()
    return starts


def _numbered(starts: torch.Tensor) -> torch.Tensor:
    return starts.long().cumsum(-1)


def _from_lengths(cumulative: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    import torch

    starts = torch.zeros(ids.numel(), dtype=torch.bool)
    inner = cumulative[1:-1].long().cpu()
    starts[inner[inner < ids.numel()]] = True
    return _numbered(starts.reshape(ids.shape))


def _from_positions(positions: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """A new document where the position goes down between two real tokens (left padding counts 1, 1, 1, 0, 1 and is none)."""
    import torch

    starts = torch.zeros(positions.shape, dtype=torch.bool)
    down = positions[:, 1:] < positions[:, :-1]
    if real is not None:
        down = down & real[:, 1:] & real[:, :-1]
    else:
        # Without a mask a constant run in front is left padding: the restart after it begins the only document.
        constant = (positions[:, 1:] == positions[:, :-1]).long().cumprod(-1).bool()
        after_run = torch.zeros_like(down)
        after_run[:, 1:] = constant[:, :-1]
        down = down & ~after_run
    starts[:, 1:] = down.cpu()
    return _numbered(starts)


def _from_square_mask(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A new document where a real token may not look at the token before it."""
    import torch

    square = mask[:, 0] if mask.dim() == 4 else mask
    allowed = square if square.dtype == torch.bool else (square > -1.0 if bool((square < 0).any()) else square > 0)
    allowed = allowed.expand(ids.shape[0], -1, -1)
    before = torch.diagonal(allowed, offset=-1, dim1=-2, dim2=-1)
    itself = torch.diagonal(allowed, dim1=-2, dim2=-1)
    starts = torch.zeros(ids.shape, dtype=torch.bool)
    starts[:, 1:] = (~before & itself[:, 1:] & itself[:, :-1]).cpu()
    return _numbered(starts)
