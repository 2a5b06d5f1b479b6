"""What a model and the user's functions keep beside parameters and buffers: numbers, caches, sources of randomness."""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_CONTAINERS = (list, dict, set, deque)
_DEPTH = 4
"""How many functions deep sources of randomness are looked for in what a loss refers to."""


class KeptAttributes:
    """Plain attributes of modules (not parameters, buffers, submodules, hooks): `restore` puts them back.

    Kept: numbers, tensors with their values, lists, dicts, sets and deques with what stands in them, generators. An attribute
    that was None or absent and holds a tensor afterwards (a cache made at the first forward) is emptied again. Flags and other
    objects stay as they are: a library that installs hooks at the first forward sets a flag, and both must go together.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        import torch

        own = frozenset(vars(torch.nn.Module()))
        self._kept: list[tuple[dict[str, Any], frozenset[str], dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._randomness: list[Any] = []
        for module in modules:
            # Reducers and sharded states keep numbers that belong to what C++ has done meanwhile.
            if type(module).__module__.startswith(("torch.nn.parallel", "torch.distributed")):
                continue
            attributes = vars(module)
            kept, values = {}, []
            for name, value in attributes.items():
                if name in own:
                    continue
                if value is None or type(value) in (int, float):
                    kept[name] = value
                elif isinstance(value, torch.Tensor):
                    kept[name] = value
                    values.append((value, value.detach().clone()))
                elif type(value) in _CONTAINERS:
                    kept[name] = value
                    self._contents.append((value, value.copy()))
                elif is_randomness(value):
                    self._randomness.append(value)
            self._kept.append((attributes, own, kept, values))

    def randomness(self) -> list[Any]:
        """Generators that the modules hold as attributes."""
        return self._randomness

    def restore(self) -> None:
        """Put everything back; what did not change is not written to."""
        import torch

        for container, contents in self._contents:
            if not _same_items(container, contents):
                container.clear()
                container.extend(contents) if isinstance(container, (list, deque)) else container.update(contents)
        for attributes, own, kept, values in self._kept:
            for name, value in kept.items():
                now = attributes.get(name)
                if now is not value and (value is not None or isinstance(now, torch.Tensor)):
                    attributes[name] = value
            for name in [n for n, v in attributes.items() if isinstance(v, torch.Tensor) and n not in kept and n not in own]:
                del attributes[name]
            for tensor, value in values:
                put_value(tensor, value)


def put_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write a value back into a tensor unless it already is that value, bit for bit."""
    import torch

    if not same_bits(tensor, value):
        with torch.no_grad():
            tensor.detach().copy_(value)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal shape and equal bits: NaN is itself, 0.0 is not -0.0. One pass over both.

    Tensors whose bits cannot be viewed as integers (sparse, sharded, complex) are compared by value; meta tensors are equal.
    """
    import torch

    if one.is_meta or other.is_meta:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.detach(), other.detach()
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    try:
        return bool(torch.equal(one.view(whole), other.view(whole)))
    except (RuntimeError, NotImplementedError):
        return bool(torch.equal(one, other)) or bool(
            torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(0.0), other.nan_to_num(0.0))
        )


def _same_items(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(a is b and one[a] is other[b] for a, b in zip(one, other, strict=True))
    if isinstance(one, set):
        return bool(one == other)
    return all(a is b for a, b in zip(one, other, strict=True))


def is_randomness(value: Any) -> bool:
    """True for generators of torch, numpy and Python."""
    import torch

    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState))


def keep_randomness(source: Any) -> Callable[[], None]:
    """A function that puts a generator back into the state it is in now."""
    import copy

    import torch

    if isinstance(source, torch.Generator):
        state = source.get_state()

        def put_back() -> None:
            source.set_state(state)

        return put_back
    if isinstance(source, random.Random):
        return functools.partial(source.setstate, source.getstate())
    if hasattr(source, "set_state"):
        return functools.partial(source.set_state, source.get_state())
    return functools.partial(setattr, source.bit_generator, "state", copy.deepcopy(source.bit_generator.state))


def randomness_behind(functions: Sequence[Any]) -> list[Any]:
    """Generators that functions of the user refer to: closure, defaults, globals by name, bound objects, a few functions deep."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    queue = [(f, 0) for f in functions if f is not None]
    while queue:
        value, depth = queue.pop()
        if id(value) in seen or isinstance(value, ModuleType):
            continue
        seen.add(id(value))
        if is_randomness(value):
            found[id(value)] = value
        elif depth < _DEPTH:
            queue += [(part, depth + 1) for part in _parts(value)]
    return list(found.values())


def _parts(value: Any) -> Iterator[Any]:
    """What a function, a bound method, a partial, a small container or an object of the user's own holds."""
    import torch

    if isinstance(value, FunctionType):
        yield from (c.cell_contents for c in value.__closure__ or () if _is_filled(c))
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        if not value.__module__.startswith(("torch.", "transformers.", "numpy.")):
            yield from (value.__globals__[n] for n in _names(value.__code__) if n in value.__globals__)
    elif isinstance(value, MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (list, tuple)) and len(value) <= 16:
        yield from value
    elif isinstance(value, Mapping) and type(value) is dict and len(value) <= 64:
        yield from value.values()
    elif not isinstance(value, (type, torch.Tensor)) and hasattr(value, "__dict__"):
        yield from list(vars(value).values())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
