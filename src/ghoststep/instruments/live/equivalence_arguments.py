"""The recorded arguments of a call, cut to one example and to its real tokens, put in another order, or padded anew.

B examples, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook

if TYPE_CHECKING:
    import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def cut(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], example: int, start: int, stop: int, shape: tuple[int, int]
) -> Arguments:
    """One example's positions start..stop: dimension of size B (the first, or the second behind a small one) to the example,
    every other dimension of size T to the positions; cumulative lengths of a batch of one example, and the largest length beside
    them, to those of the positions. `CannotLook` on other one-dimensional lengths that speak of the whole batch."""
    import torch

    batch, time = shape

    def one(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if batch == 1 and _is_cumulative(tensor, time):
            inside = (tensor > start) & (tensor < stop)
            return torch.cat([tensor.new_tensor([0]), tensor[inside] - start, tensor.new_tensor([stop - start])])
        axis = _batch_axis(tensor, batch)
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

    positional, named = _apply(args, kwargs, one)
    longest = {k: min(v, stop - start) for k, v in named.items() if "max" in k and type(v) is int and 0 < v <= time}
    return positional, {**named, **longest}


def take(args: tuple[Any, ...], kwargs: Mapping[str, Any], examples: Sequence[int], shape: tuple[int, int]) -> Arguments:
    """These examples in this order (also repeated ones), at the full length; `CannotLook` as in `cut`."""
    import torch

    batch, time = shape

    def one(name: str, tensor: torch.Tensor) -> torch.Tensor:
        axis = _batch_axis(tensor, batch)
        if tensor.dim() == 1 and tensor.shape[0] not in (1, batch, time):
            raise CannotLook(f"argument {name} of {tensor.shape[0]} numbers speaks of the whole batch")
        if axis is None or (tensor.dim() == 1 and batch == 1):
            return tensor
        return tensor.index_select(axis, torch.tensor(list(examples), device=tensor.device))

    return _apply(args, kwargs, one)


def to_float32(arguments: Arguments) -> Arguments:
    """The same with bfloat16 and float16 tensors in float32."""
    import torch

    low = (torch.bfloat16, torch.float16)
    return _apply(arguments[0], arguments[1], lambda name, t: t.float() if t.dtype in low else t)


def _batch_axis(tensor: torch.Tensor, batch: int) -> int | None:
    return next((d for d in (0, 1) if tensor.dim() > d and tensor.shape[d] == batch), None)


def _is_cumulative(tensor: torch.Tensor, time: int) -> bool:
    """0, ..., T, never falling: where the documents of a flattened pack start."""
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.shape[0] < 2:
        return False
    ends = int(tensor[0]) == 0 and int(tensor[-1]) == time
    return ends and bool((tensor[1:] >= tensor[:-1]).all())


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
