"""Where the logits stand in what a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def find_logits(output: Any, num_classes: int | None) -> torch.Tensor | None:
    """The logits in a model's output (detached), None if there are none.

    A tensor output is itself. Otherwise "logits" by name, else the first floating tensor with `num_classes` as last dimension.
    """
    import torch

    def fits(value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2
            and (num_classes is None or value.shape[-1] == num_classes)
        )  # fmt: skip

    if isinstance(output, torch.Tensor):
        return output.detach() if fits(output) else None
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, torch.Tensor):
        return named.detach()
    if isinstance(output, Mapping):
        items = list(output.values())
    elif isinstance(output, (tuple, list)):
        items = list(output)
    else:
        items = list(getattr(output, "__dict__", {}).values())
    found = next((value for value in items if fits(value)), None)
    return None if found is None else found.detach()


def num_places(model: torch.nn.Module) -> int:
    """How many tensors `forward` takes by place."""
    import inspect

    parameters = list(inspect.signature(model.forward).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 1 << 16
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def vectors(output: Any) -> Any:
    """The rows that a look-up gives, where it gives them alone or first in a tuple (with the scale of a quantised table)."""
    import torch

    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, torch.Tensor) else output


def with_vectors(output: Any, new: torch.Tensor) -> Any:
    """The same output with other rows."""
    return (new, *output[1:]) if isinstance(output, tuple) else new
