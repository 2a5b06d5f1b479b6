"""The recorded arguments of a call, cut to one example and to its real tokens, or padded anew. B examples, T positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook

if TYPE_CHECKING:
    import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def cut(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], example: int, start: int, stop: int, shape: tuple[int, int]
) -> Arguments:
    """One example's positions start..stop: dimension of size B (the first, or the second behind a small one) to the example,
    every other dimension of size T to the positions. `CannotLook` on one-dimensional lengths that speak of the whole batch."""
    batch, time = shape

    def one(name: str, tensor: torch.Tensor) -> torch.Tensor:
        axis = next((d for d in (0, 1) if tensor.dim() > d and tensor.shape[d] == batch), None)
        if tensor.dim() == 1 and tensor.shape[0] not in (1, batch, time):
            raise CannotLook(f"argument {name} of {tensor.shape[0]} numbers speaks of the whole batch")
        if axis is not None and tensor.dim() > 1:
            tensor = tensor.narrow(axis, example, 1)
        elif tensor.dim() == 1 and tensor.shape[0] == batch:
            return tensor.narrow(0, example, 1)
        for d in range(tensor.dim()):
            if d != axis and tensor.shape[d] == time:
                tensor = tensor.narrow(d, start, stop - start)
        return tensor

    return _apply(args, kwargs, one)


def pad(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], time: int, num: int, *, left: bool, pad_id: int, ids: Any
) -> Arguments:
    """Add `num` PAD positions to a single example of `time` tokens: its ids take `pad_id`, labels -100, masks and types 0."""
    import torch

    def one(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() != 2 or tensor.shape[1] != time:
            if tensor.dim() > 2:
                raise CannotLook(f"argument {name} has {tensor.dim()} dimensions: it is not known how padding would change it")
            return tensor
        value = 0
        if not tensor.is_floating_point() and torch.equal(tensor.reshape(-1).cpu().long(), ids.reshape(-1)):
            value = pad_id
        if "label" in name or "target" in name:
            value = -100
        filled = tensor.new_full((tensor.shape[0], num), value)
        return torch.cat([filled, tensor] if left else [tensor, filled], dim=1)

    return _apply(args, kwargs, one)


def _apply(args: tuple[Any, ...], kwargs: Mapping[str, Any], one: Callable[[str, torch.Tensor], torch.Tensor]) -> Arguments:
    import torch

    def walk(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return one(name, value)
        if isinstance(value, dict):
            return {k: walk(str(k), v) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(walk(name, v) for v in value)
        return value

    positional = tuple(walk(f"argument {i}", a) for i, a in enumerate(args))
    return positional, {k: walk(k, v) for k, v in kwargs.items()}
