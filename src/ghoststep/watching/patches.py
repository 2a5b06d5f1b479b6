"""The few functions of torch that are wrapped while something is watched, once a process, and put back afterwards.

`torch.autograd.backward` carries `Tensor.backward` too and has finished every reduction (DDP, FSDP2) when it returns. A skip of
`GradScaler.step` fires no hook of the optimizer. `clip_grad_norm_` finds its two halves in its module at each call, so
wrapping those shows the norms and the bound even where the script imported the function by name.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Listener(Protocol):
    """What a watch is told. None of these may raise."""

    def before_backward(self, tensors: Any) -> None:
        """A backward starts from these tensors."""

    def after_backward(self, tensors: Any) -> None:
        """It is over; gradients are reduced."""

    def before_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """`GradScaler.step` starts."""

    def after_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """It is over; if the optimizer did not step meanwhile, the step was skipped."""

    def wants_norms(self) -> bool:
        """True if it would use the norms that torch's clip computes."""

    def normed(self, gradients: Sequence[Any], norms: Sequence[Any]) -> None:
        """torch has computed the norm of each of these gradients, in this order; nothing is clipped yet."""

    def clipped(self, parameters: Any, max_norm: float) -> None:
        """torch's clip multiplies these parameters' gradients now."""

    def stepped(self, optimizer: Any) -> None:
        """An optimizer's step is over."""


_listeners: list[Listener] = []
_undo: list[Callable[[], None]] = []
_one_at_a_time = threading.Lock()  # two threads that clip at once must not put each other's function back


def listen(listener: Listener) -> None:
    """Tell this listener from now on; the first one sets the wrappers."""
    if not _listeners:
        _set()
    _listeners.append(listener)


def leave(listener: Listener) -> None:
    """Stop telling it; the last one puts everything back."""
    if listener in _listeners:
        _listeners.remove(listener)
        if not _listeners:
            while _undo:
                _undo.pop()()


def _set() -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    _wrap(torch.autograd, "backward", _backward)
    _wrap(torch.amp.GradScaler, "step", _scaler_step)
    from torch.nn.utils import clip_grad

    if hasattr(clip_grad, "_clip_grads_with_norm_"):
        _wrap(clip_grad, "_clip_grads_with_norm_", _clip)
        _wrap(torch.nn.utils, "clip_grads_with_norm_", _clip)  # as ghoststep's clip calls it
    if hasattr(clip_grad, "_get_total_norm"):
        _wrap(clip_grad, "_get_total_norm", _total_norm)
        _wrap(torch.nn.utils, "get_total_norm", _total_norm)  # the same, as ghoststep's clip calls it

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        for listener in tuple(_listeners):
            listener.stepped(optimizer)

    handle = register_optimizer_step_post_hook(after_step)
    _undo.append(handle.remove)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    is_on = True

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, args, kwargs) if is_on else original(*args, **kwargs)

    setattr(owner, name, wrapper)

    def undo() -> None:
        # Somebody wrapped it after us: they keep calling ours, which then only passes on, also when another watch wraps anew.
        nonlocal is_on
        is_on = False
        if getattr(owner, name) is wrapper:
            setattr(owner, name, original)

    _undo.append(undo)


def _backward(original: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    import torch

    if torch._C._current_graph_task_id() != -1:  # a backward inside a backward (reentrant checkpointing) is part of it
        return original(*args, **kwargs)
    tensors = args[0] if args else kwargs.get("tensors")
    for listener in tuple(_listeners):
        listener.before_backward(tensors)
    result = original(*args, **kwargs)
    for listener in tuple(_listeners):
        listener.after_backward(tensors)
    return result


def _scaler_step(original: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    scaler = args[0]
    optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
    for listener in tuple(_listeners):
        listener.before_scaler_step(scaler, optimizer)
    result = original(*args, **kwargs)
    for listener in tuple(_listeners):
        listener.after_scaler_step(scaler, optimizer)
    return result


def _total_norm(original: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """While torch computes a total norm, keep the norms it is made of: nobody has to read the gradients again."""
    import torch

    gradients = args[0] if args else kwargs.get("tensors")
    kind = args[1] if len(args) > 1 else kwargs.get("norm_type", 2.0)
    asking = [x for x in _listeners if x.wants_norms()]
    if not asking or not isinstance(gradients, (list, tuple)) or kind != 2.0 or not _one_at_a_time.acquire(blocking=False):
        return original(*args, **kwargs)
    norms: list[Any] = []
    foreach, thread = torch._foreach_norm, threading.get_ident()

    def kept(*given: Any, **more: Any) -> Any:
        found = foreach(*given, **more)
        if threading.get_ident() == thread:
            norms.extend(found)
        return found

    try:
        torch._foreach_norm = kept
        result = original(*args, **kwargs)
    finally:
        torch._foreach_norm = foreach
        _one_at_a_time.release()
    # One call means one device and one dtype: the order is that of the gradients.
    if len(norms) == len(gradients) and len({(g.device, g.dtype) for g in gradients}) == 1:
        for listener in asking:
            listener.normed(gradients, norms)
    return result


def _clip(original: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    parameters = args[0] if args else kwargs.get("parameters")
    bound = args[1] if len(args) > 1 else kwargs.get("max_norm")
    # A generator of parameters would be used up by looking at it: it is not looked at.
    for listener in tuple(_listeners):
        listener.clipped(parameters if isinstance(parameters, (list, tuple)) else (), float(bound))  # type: ignore[arg-type]
    return original(*args, **kwargs)
