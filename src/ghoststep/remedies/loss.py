"""`lm_loss`: the next-token loss with the shift inside, and a mean that weighs every token the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ghoststep.errors import UsageError

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""Labels that count for nothing; torch's own convention."""


def lm_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor, *, num_tokens: int | torch.Tensor | None = None) -> torch.Tensor:
    """Cross-entropy of the logits at t with the label at t + 1, in float32, as a scalar.

    labels_BT are the input ids themselves (-100 where a token must not be trained): do not shift them before. Without
    `num_tokens` the mean over the labels that count. With accumulation give the number of counting labels in the whole window
    (`(labels[:, 1:] != -100).sum()` over its micro-batches): the sum is divided by it, so that the micro-batches' losses add up
    to the mean over the window.

    NaN logits give NaN. If no label counts, the loss is 0 and its gradient too, not NaN. Raises `UsageError` for other shapes.
    Cost: one float32 copy of the logits, as in any cross-entropy.
    """
    import torch

    if logits_BTV.dim() != 3 or labels_BT.shape != logits_BTV.shape[:2]:
        raise UsageError(
            f"got logits of shape {list(logits_BTV.shape)} and labels of shape {list(labels_BT.shape)}; expected [B, T, V] and [B, T]"
        )
    wanted = labels_BT[:, 1:].to(logits_BTV.device)
    total: torch.Tensor = torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1).float(), wanted.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    if num_tokens is None:
        num_tokens = (wanted != IGNORED).sum().clamp_min(1)
    return total / num_tokens
