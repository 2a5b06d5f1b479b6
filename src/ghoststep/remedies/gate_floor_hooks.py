"""What a gate floor leaves on a model: a pair of hooks on the smallest module around each gate.

Inside that module's forward a function mode is on, which adds delta to the output of one call: the n-th activation. The hooks are
plain objects without a reference to the module, so that `copy.deepcopy`, `pickle` and data-parallel replicas carry them along.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import GhoststepError

if TYPE_CHECKING:
    import torch


class GateMovedError(GhoststepError, RuntimeError):
    """A floored module took a way through its forward that was not seen at installation: its gate was not where it had been."""


@functools.cache
def activations() -> dict[Any, str]:
    """The functions that are a gate's activation, with their kinds."""
    import torch

    sigmoids = (torch.sigmoid, torch.Tensor.sigmoid, torch.nn.functional.sigmoid, torch.special.expit)
    return {torch.nn.functional.silu: "silu", **dict.fromkeys(sigmoids, "sigmoid")}


_MODE: Any = None
"""The mode's class. Made once, by the first hook: torch.compile traces its use, not its making."""


def _prepare() -> None:
    global _MODE  # noqa: PLW0603 - torch is not imported with this module
    if _MODE is not None:
        return
    from torch.overrides import TorchFunctionMode

    kinds = activations()

    class Floor(TorchFunctionMode):
        """Adds `delta` to the output of the `order`-th activation and counts them."""

        def __init__(self, delta: float, order: int) -> None:
            super().__init__()
            self.delta, self.order, self.seen = delta, order, 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            if func in kinds:
                if self.seen == self.order:
                    output = output + self.delta
                self.seen += 1
            return output

    _MODE = Floor


_OPEN = threading.local()


def _open_modes() -> list[Any]:
    if not hasattr(_OPEN, "modes"):
        _OPEN.modes = []
    return _OPEN.modes  # type: ignore[no-any-return]


class Enter:
    """Before the forward. order: which activation inside is the gate, from 0. total: how many there are."""

    def __init__(self, delta: float, kind: str, order: int, total: int) -> None:
        self.delta, self.kind, self.order, self.total = delta, kind, order, total
        _prepare()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.delta, self.kind, self.order, self.total)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        mode = _MODE(self.delta, self.order)
        mode.__enter__()
        _open_modes().append(mode)


@dataclass(slots=True)
class Leave:
    """After the forward, also where it raised (then `output` is None)."""

    total: int

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        mode = _open_modes().pop()
        mode.__exit__(None, None, None)
        if output is not None and mode.seen != self.total:
            raise GateMovedError(
                f"{type(module).__name__} called {mode.seen} activations in this forward and {self.total} when its gate floor was "
                "installed: it took another way (a kernel, a cache, another mode), so the floor may be missing. Remove the floor "
                "(floor.remove()), or install it on the model as it runs now"
            )


def install(module: torch.nn.Module, delta: float, kind: str, order: int, total: int) -> None:
    """Put the pair on. Last in, first out: hooks that were there before run outside the mode."""
    module.register_forward_pre_hook(Enter(delta, kind, order, total))
    module.register_forward_hook(Leave(total), always_call=True, prepend=True)


def strip(module: torch.nn.Module) -> int:
    """Take every pair off this module; how many there were."""
    found = [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, Enter)]
    for key in found:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, Leave)]:
        del module._forward_hooks[key]
        module._forward_hooks_with_kwargs.pop(key, None)
        module._forward_hooks_always_called.pop(key, None)
    return len(found)


def floored(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Enter]]:
    """(name, module, hook) of every floored gate of a model."""
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, Enter):
                yield name, module, hook
