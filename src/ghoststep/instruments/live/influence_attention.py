"""What attention operations let through, read where they run: a listener on PyTorch functions during one forward.

It sees scaled dot product attention and softmaxes over positions; fused kernels of other libraries and fast paths of
`nn.TransformerEncoderLayer` it knows by name only, custom kernels not at all. It proposes where to look; influence decides.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MASKED_SCORE = -5e3
"""A score (or additive mask) at or below this is masked: -1e4, -65504, float32's minimum and -inf are in use."""

MAX_SINKS = 4
"""Columns behind the T keys that a softmax may carry: attention sinks."""

CHOICES = frozenset({"topk", "argmax", "sort", "argsort", "multinomial"})


@dataclass(slots=True, kw_only=True)
class AttentionSeen:
    """num_operations: attention operations seen. open_BTT: [B or 1, T, T] bool, True where some operation let a query (first T)
    see a key, None if no mask or score of that shape passed. empty_BT: queries all of whose keys were masked in one operation.
    num_choices: discrete choices among scores (expert routing).
    """

    num_operations: int = 0
    open_BTT: torch.Tensor | None = None
    empty_BT: torch.Tensor | None = None
    num_choices: int = 0


@contextlib.contextmanager
def watch_attention(batch: int, time: int) -> Iterator[AttentionSeen]:
    """Listen while the block runs. Costs a comparison and a maximum of each mask; results of the block are unchanged."""
    import torch
    from torch.overrides import TorchFunctionMode

    seen = AttentionSeen()

    class Listener(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = getattr(func, "__name__", "")
            if name == "scaled_dot_product_attention":
                _note_sdpa(seen, args, kwargs, batch, time)
            elif name == "softmax" and args and isinstance(args[0], torch.Tensor):
                _note_scores(seen, args[0], args[1] if len(args) > 1 else kwargs.get("dim"), batch, time)
            elif "attention" in name or "transformer_encoder_layer" in name:
                seen.num_operations += 1
            elif name in CHOICES and args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
                seen.num_choices += 1
            return func(*args, **kwargs)

    with Listener():
        yield seen


def _note_sdpa(seen: AttentionSeen, args: Any, kwargs: Any, batch: int, time: int) -> None:
    import torch

    seen.num_operations += 1
    query, key = (args[0], args[1]) if len(args) > 1 else (kwargs.get("query"), kwargs.get("key"))
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
    if not isinstance(query, torch.Tensor) or not isinstance(key, torch.Tensor):
        return
    if query.shape[-2] != time or key.shape[-2] != time:
        return
    if isinstance(mask, torch.Tensor):
        allowed = mask.detach() if mask.dtype == torch.bool else mask.detach() > MASKED_SCORE
        _note_open(seen, allowed, batch, time)
    elif not causal:
        _note_open(seen, torch.ones(1, 1, time, time, dtype=torch.bool, device=query.device), batch, time)


def _note_scores(seen: AttentionSeen, scores: torch.Tensor, dim: Any, batch: int, time: int) -> None:
    if scores.dim() < 3 or scores.shape[-2] != time or dim not in (-1, scores.dim() - 1):
        return
    if not time <= scores.shape[-1] <= time + MAX_SINKS:
        return
    seen.num_operations += 1
    scores = scores.detach()[..., :time]
    # Scores of thousands come near a finite mask: only what lies far below all that scores reach is masked then.
    reached = -2.0 * float(scores.max()) if scores.numel() else 0.0
    _note_open(seen, scores > (min(MASKED_SCORE, reached) if math.isfinite(reached) else MASKED_SCORE), batch, time)


def _note_open(seen: AttentionSeen, allowed: torch.Tensor, batch: int, time: int) -> None:
    """Merge one operation's mask [..., T, T] into what was seen; other leading shapes than [B, ...] and [B*heads, ...] count
    as one for the whole batch."""
    while allowed.dim() < 3:
        allowed = allowed.unsqueeze(0)
    if allowed.shape[-2] == 1:
        allowed = allowed.expand(*allowed.shape[:-2], time, allowed.shape[-1])
    if allowed.shape[-2:] != (time, time):
        return
    leading = allowed.shape[0]
    rows = allowed.reshape(batch if leading % batch == 0 else 1, -1, time, time)
    open_, empty = rows.any(dim=1).cpu(), (~rows.any(dim=-1)).any(dim=1).cpu()
    seen.open_BTT = open_ if seen.open_BTT is None else seen.open_BTT | open_
    seen.empty_BT = empty if seen.empty_BT is None else seen.empty_BT | empty
