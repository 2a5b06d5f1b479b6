"""Where the logits stand in what a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def find_logits(output: Any, num_classes: int | None) -> tuple[tuple[str | int, ...], torch.Tensor | None]:
    """Where the logits stand in a model's output: the attribute, key or place, and the tensor (detached); ((), None) if nowhere.

    A tensor output is itself. Otherwise "logits" by name, else the first floating tensor with `num_classes` as last dimension.
    """
    import torch

    def fits(value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2
            and (num_classes is None or value.shape[-1] == num_classes)
        )  # fmt: skip

    if isinstance(output, torch.Tensor):
        return ((), output.detach()) if fits(output) else ((), None)
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, torch.Tensor):
        return ("logits",), named.detach()
    items: list[tuple[str | int, Any]] = []
    if isinstance(output, Mapping):
        items = list(output.items())
    elif isinstance(output, (tuple, list)):
        items = list(enumerate(output))
    elif hasattr(output, "__dict__"):
        items = list(vars(output).items())
    for key, value in items:
        if fits(value):
            return (key,), value.detach()
    return (), None


def shape_of(value: Any) -> str:
    """ "a Tensor of shape (4, 16)", for messages."""
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
