"""What nodes of torch's autograd graph have saved, as plain numbers and rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def signed(saved: Any) -> int:
    """A saved dimension or index: torch keeps it unsigned, so that -1 comes back as 2**64 - 1."""
    number = int(saved)
    return number - (1 << 64) if number >= 1 << 63 else number


def class_dimension(node: Any) -> int:
    """The dimension that a softmax or log-softmax goes over; may be negative."""
    return signed(node._saved_dim)


def node_rows(value: torch.Tensor, node: Any) -> torch.Tensor:
    """A tensor of such a node's shape as [N, V], V its classes."""
    return value.movedim(class_dimension(node), -1).reshape(-1, value.shape[class_dimension(node)])
