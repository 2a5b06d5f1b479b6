"""Observing changes nothing: whatever runs inside `untouched` leaves model, optimizer and randomness bit for bit as they were."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def untouched(model: torch.nn.Module, optimizer: Any = None, *, with_values: bool = False) -> Iterator[None]:
    """Restore on leaving, also after an exception: buffers, gradients, modes, requires_grad, RNG of torch (CPU and CUDA),
    numpy and Python, default dtype, grad mode, and hooks that were removed from a module.

    `with_values` also restores the parameters' values and the optimizer's state and hyperparameters (for what really steps);
    it costs one copy of both. Without it nothing inside may write to a parameter. Buffers are copied (they are small: running
    statistics, position ids). Gradients are taken off for the duration and put back as the same tensors.
    Tied and shared tensors are saved once. DTensors and FSDP shards are restored shard by shard (values are copied as they are).
    """
    import torch

    modules = list(model.modules())
    parameters = list(model.parameters())
    modes = [m.training for m in modules]
    flags = [p.requires_grad for p in parameters]
    gradients = [p.grad for p in parameters]
    buffers = [(m, name, b, None if b is None else b.detach().clone()) for m in modules for name, b in m._buffers.items()]
    hooks = [_hooks_of(m) for m in modules]
    values = [p.detach().clone() for p in parameters] if with_values else None
    state = _copy_state(optimizer) if with_values and optimizer is not None else None
    randomness = _random_state()
    dtype, grad_enabled = torch.get_default_dtype(), torch.is_grad_enabled()
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad_enabled)
        for m, mode, saved in zip(modules, modes, hooks, strict=True):
            m.training = mode
            _restore_hooks(m, saved)
        for m, name, buffer, copy in buffers:
            m._buffers[name] = buffer
            if buffer is not None and copy is not None and not _equal_bits(buffer, copy):
                with torch.no_grad():
                    buffer.copy_(copy)
        for i, p in enumerate(parameters):
            p.requires_grad_(flags[i])
            p.grad = gradients[i]
            if values is not None and not _equal_bits(p, values[i]):
                with torch.no_grad():
                    p.copy_(values[i])
        if state is not None:
            _restore_state(optimizer, state)
        _restore_random(randomness)


_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def _hooks_of(module: torch.nn.Module) -> dict[str, dict[int, Any]]:
    return {name: dict(getattr(module, name)) for name in _HOOK_DICTS if getattr(module, name, None)}


def _restore_hooks(module: torch.nn.Module, saved: dict[str, dict[int, Any]]) -> None:
    """Put back hooks that were removed. Added ones stay: instruments take theirs off by handle, and a library that installs its
    own at the first forward remembers that it did (transformers' output capturing) and would never install them again."""
    for name in _HOOK_DICTS:
        now = getattr(module, name, None)
        wanted = saved.get(name, {})
        if now is not None and any(key not in now for key in wanted):
            added = {key: hook for key, hook in now.items() if key not in wanted}
            now.clear()
            now.update({**wanted, **added})


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    if one.is_meta or other.is_meta:
        return True
    # NaN differs from itself: compare what is not NaN, and where NaN stands.
    return bool(torch.equal(one, other)) or bool(
        one.is_floating_point()
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(0.0), other.nan_to_num(0.0))
    )


def _random_state() -> tuple[Any, ...]:
    import torch

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    numpy_state = None
    import sys

    if "numpy" in sys.modules:
        import numpy as np

        numpy_state = np.random.get_state()
    return torch.get_rng_state(), cuda, random.getstate(), numpy_state


def _restore_random(state: tuple[Any, ...]) -> None:
    import torch

    cpu, cuda, python, numpy_state = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    if numpy_state is not None:
        import numpy as np

        np.random.set_state(numpy_state)


class _Kept:
    """A tensor and a copy of its value: restoring writes the value back into the same object, which others may hold."""

    __slots__ = ("tensor", "value")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.value = tensor, tensor.detach().clone()


def _keep(value: Any) -> Any:
    """Tensors become `_Kept`, containers are copied, everything else (numbers, callables) is taken as it is."""
    import torch

    if isinstance(value, torch.Tensor):
        return _Kept(value)
    if isinstance(value, dict):
        return {k: _keep(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_keep(v) for v in value)
    return value


def _put_back(kept: Any) -> Any:
    import torch

    if isinstance(kept, _Kept):
        if not _equal_bits(kept.tensor, kept.value):
            with torch.no_grad():
                kept.tensor.copy_(kept.value)
        return kept.tensor
    if isinstance(kept, dict):
        return {k: _put_back(v) for k, v in kept.items()}
    if type(kept) in (list, tuple):
        return type(kept)(_put_back(v) for v in kept)
    return kept


def _copy_state(optimizer: Any) -> tuple[Any, ...]:
    states = {p: _keep(s) for p, s in optimizer.state.items()}
    groups = [{k: list(v) if k == "params" else _keep(v) for k, v in g.items()} for g in optimizer.param_groups]
    return states, groups


def _restore_state(optimizer: Any, saved: tuple[Any, ...]) -> None:
    states, groups = saved
    optimizer.state.clear()
    optimizer.state.update({p: _put_back(s) for p, s in states.items()})
    for now, then in zip(optimizer.param_groups, groups, strict=False):
        for key in set(now) - set(then):
            del now[key]
        now.update({k: v if k == "params" else _put_back(v) for k, v in then.items()})
    del optimizer.param_groups[len(groups) :]
