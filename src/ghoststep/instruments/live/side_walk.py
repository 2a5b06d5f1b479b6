"""What an object of the user's holds, and how it is put back: links (variables, attributes) and contents of containers."""

from __future__ import annotations

import functools
import site
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

LARGE = 10_000
"""Containers with more items are kept as they are, but their items are not followed."""
_ABSENT = object()
_OPAQUE = (
    "threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio", "socket", "ssl", "logging",
    "subprocess", "weakref",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Link:
    """A place that refers to a value: a cell of a closure, an entry of a namespace, a slot. `is_kept`: restored."""

    holder: Any
    name: str
    value: Any
    is_kept: bool = True

    @property
    def is_absent(self) -> bool:
        """True where nothing stood there."""
        return self.value is _ABSENT

    def put(self, value: Any) -> None:
        """Make the place refer to this value."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, dict):
            dict.__setitem__(self.holder, self.name, value)
        elif isinstance(self.holder, type):
            setattr(self.holder, self.name, value)
        else:
            object.__setattr__(self.holder, self.name, value)

    def restore(self) -> None:
        """Refer to the former value, or to nothing."""
        now = _read(self.holder, self.name)
        if now is self.value:
            return
        if not self.is_absent:
            self.put(self.value)
        elif isinstance(self.holder, CellType):
            del self.holder.cell_contents
        elif isinstance(self.holder, dict):
            self.holder.pop(self.name, None)
        else:
            delattr(self.holder, self.name)


def _read(holder: Any, name: str) -> Any:
    if isinstance(holder, CellType):
        try:
            return holder.cell_contents
        except ValueError:
            return _ABSENT
    if isinstance(holder, dict):
        return holder.get(name, _ABSENT)
    if isinstance(holder, type):
        return vars(holder).get(name, _ABSENT)
    try:
        return object.__getattribute__(holder, name)
    except AttributeError:
        return _ABSENT


def links(value: Any) -> list[Link]:
    """The places in an object that may refer to another value afterwards, and (not kept) those that never change."""
    if isinstance(value, FunctionType):
        return [*_of_function(value)]
    if isinstance(value, MethodType):
        return [_fixed("__self__", value.__self__), _fixed("__func__", value.__func__)]
    if isinstance(value, functools.partial):
        return [_fixed("func", value.func), _fixed("args", value.args), _fixed("keywords", value.keywords)]
    if isinstance(value, type):
        return [] if is_library(value.__module__) else [*_of_class(value)]
    if isinstance(value, ModuleType):
        if is_library(value.__name__):
            return []
        return [Link(holder=vars(value), name=n, value=v) for n, v in vars(value).items() if not n.startswith("__")]
    return [*_of_instance(value)]


def _fixed(name: str, value: Any) -> Link:
    return Link(holder=None, name=name, value=value, is_kept=False)


def _of_function(function: FunctionType) -> Iterator[Link]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield Link(holder=cell, name=name, value=_read(cell, name))
    yield _fixed("__defaults__", function.__defaults__)
    yield _fixed("__kwdefaults__", function.__kwdefaults__)
    yield from (Link(holder=vars(function), name=n, value=v) for n, v in vars(function).items())
    if is_library(function.__module__ or ""):
        return
    for name in dict.fromkeys(_names(function.__code__)):
        if name in function.__globals__ or name in _stored(function.__code__):
            yield Link(holder=function.__globals__, name=name, value=function.__globals__.get(name, _ABSENT))


def _of_class(cls: type) -> Iterator[Link]:
    for name, value in vars(cls).items():
        if name.startswith("__") and name != "__call__":
            continue
        inner = getattr(value, "__func__", value) if isinstance(value, (staticmethod, classmethod)) else value
        inner = inner.fget if isinstance(inner, property) else inner
        is_data = not callable(inner) and not hasattr(type(value), "__get__")
        yield Link(holder=cls, name=name, value=value) if is_data else _fixed(name, inner)


def _of_instance(value: Any) -> Iterator[Link]:
    own = namespace(value)
    if own is not None:
        yield from (Link(holder=own, name=n, value=v) for n, v in own.items())
        yield _fixed("__class__", type(value))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                full = f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
                yield Link(holder=value, name=full, value=_read(value, full))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _stored(code: CodeType) -> set[str]:
    """Globals that a function assigns: they may not exist before."""
    import dis

    found = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    return found.union(*(_stored(c) for c in code.co_consts if isinstance(c, CodeType)))


def namespace(value: Any) -> dict[str, Any] | None:
    """The attributes of an instance or a function, where they stand in a plain dict; None for modules, classes and others."""
    own = None if isinstance(value, (type, ModuleType)) else getattr(value, "__dict__", None)
    return own if type(own) is dict else None


def contents(value: Any) -> Any:
    """A shallow copy of what a container of the standard library (or a subclass) holds; None for anything else."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, set):
        return set(value)
    return list(value) if isinstance(value, (list, deque)) else None


def same_contents(container: Any, kept: Any) -> bool:
    """The same objects in the same order."""
    if len(container) != len(kept):
        return False
    if isinstance(container, dict):
        return all(a is b and dict.__getitem__(container, a) is kept[b] for a, b in zip(container, kept, strict=True))
    if isinstance(container, set):
        return bool(container == kept)
    return all(a is b for a, b in zip(container, kept, strict=True))


def put_contents(container: Any, kept: Any) -> None:
    """Fill the same container again, past methods of a subclass."""
    if isinstance(container, dict):
        if list(container) != list(kept):
            dict.clear(container)
        for key, value in kept.items():  # mostly the keys are the same: the order stays, and nothing is ever missing
            dict.__setitem__(container, key, value)
        return
    base: Any = next(b for b in (set, list, deque) if isinstance(container, b))
    base.clear(container)
    (set.update if base is set else base.extend)(container, kept)


def is_opaque(value: Any) -> bool:
    """Threads, locks, sockets, queues, loggers: what they hold belongs to others, too."""
    module = type(value).__module__
    return module.partition(".")[0] in _OPAQUE and not isinstance(value, type)


@functools.lru_cache(maxsize=4096)
def is_library(name: str) -> bool:
    """True for modules of the standard library and of installed packages: their globals are not the user's."""
    root = name.partition(".")[0]
    if (root in sys.stdlib_module_names and root != "__main__") or root == __name__.partition(".")[0]:
        return True  # this package too, also where it runs from a clone: its own state must not be put back under it
    file = getattr(sys.modules.get(name), "__file__", None) or getattr(sys.modules.get(root), "__file__", None)
    if file is None:
        return root != "__main__" and root not in sys.modules
    places = [*site.getsitepackages(), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    return "site-packages" in str(file) or any(str(file).startswith(p) for p in places)
