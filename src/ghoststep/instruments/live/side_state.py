"""What the user's own functions keep beside the model: counters, averages of weights, metrics, histories. Put back bit for bit.

Found by following what a function refers to: its closure, defaults, the globals that its code names, the object it is bound to,
and what these hold. Objects are kept by their attributes, containers by their contents, tensors and arrays by value.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.instruments.live.kept_attributes import is_randomness, keep_randomness, put_value
from ghoststep.instruments.live.side_walk import (
    LARGE,
    Link,
    is_library,
    is_opaque,
    links,
    namespace,
    put_contents,
    same_contents,
)
from ghoststep.instruments.live.side_walk import contents as contents_of
from ghoststep.subjects.setup import Setup
from ghoststep.undisturbed import undisturbed

if TYPE_CHECKING:
    import torch

MAX_OBJECTS = 50_000
"""Objects that are followed, nearest first; what lies beyond is not kept."""
_SPARE_FRACTION = 0.4
"""Share of the memory that is free now which copies of tensors beside the model may take."""


@contextlib.contextmanager
def side_state(setup: Setup, functions: Sequence[Callable[..., Any] | None]) -> Iterator[None]:
    """Inside, the functions may be called; what they keep is as before afterwards, also after an exception.

    Put back: variables of their closures and globals that their code names, attributes (of their own classes and modules too),
    contents of lists, dicts, sets and deques, values and gradients of tensors, numpy arrays, generators of random numbers.
    Iterators over lists and ranges are replaced by copies for the duration, files open for writing by files in memory.
    Iterators that cannot be copied (generators, of a DataLoader) raise `CannotLook` when they are touched, and stay where they
    are. Not seen: what C code, another process or a file keeps, and what lies more than `MAX_OBJECTS` objects away.
    `CannotLook` where copies of the tensors do not fit. Cost: one copy of these tensors; no pass.
    """
    kept = _SideState([f for f in functions if f is not None], _known(setup))
    try:
        kept.guard()
        yield
    finally:
        with undisturbed():
            kept.restore()


def _known(setup: Setup) -> list[Any]:
    """What is kept by others: the model, its tensors, optimizer, scheduler, scaler and the batches."""
    model = setup.model
    optimizers = setup.optimizer if isinstance(setup.optimizer, (list, tuple)) else [setup.optimizer]
    declared = [setup, *optimizers, setup.scheduler, setup.scaler, setup.batches, *setup.batches]
    return [*declared, *model.modules(), *model.parameters(), *model.buffers()]


class _SideState:
    def __init__(self, functions: Sequence[Callable[..., Any]], known: Sequence[Any]) -> None:
        self._alive: list[Any] = [*known]  # ids stay taken
        self._seen = {id(o) for o in known if o is not None}
        self._links: list[Link] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, bool]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._sources: list[Callable[[], None]] = []
        self._room: dict[torch.device, int] = {}
        self._follow(functions)

    def _follow(self, functions: Sequence[Any]) -> None:
        queue: deque[Any] = deque(functions)
        count = 0
        while queue and count < MAX_OBJECTS:
            value = queue.popleft()
            if value is None or isinstance(value, (bool, int, float, complex, str, bytes)) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._alive.append(value)
            count += 1
            queue.extend(self._keep(value))

    def _keep(self, value: Any) -> list[Any]:
        """Keep one object; returns what it holds."""
        import torch

        if isinstance(value, torch.Tensor):
            return self._keep_tensor(value)
        if is_randomness(value):
            self._sources.append(keep_randomness(value))
            return []
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            if value.flags.writeable and not isinstance(value, numpy.memmap):
                self._take_room(torch.device("cpu"), value.nbytes)
                self._arrays.append((value, value.copy()))
            return []
        if is_opaque(value):
            return []
        held: list[Any] = []
        found = contents_of(value)
        if found is not None:
            self._containers.append((value, found))
            inside = [*found, *found.values()] if isinstance(found, dict) else [*found]
            held += inside if len(inside) <= LARGE else []
        elif isinstance(value, (tuple, frozenset)):
            held += [*value] if len(value) <= LARGE else []
        own = namespace(value)
        if own is not None:  # attributes that are added go away again
            self._containers.append((own, dict(own)))
        mine = links(value)
        self._links += [link for link in mine if link.is_kept]
        return held + [link.value for link in mine if not link.is_absent]

    def _keep_tensor(self, tensor: torch.Tensor) -> list[Any]:
        if tensor.is_meta:
            return []
        self._take_room(tensor.device, tensor.numel() * tensor.element_size())
        self._tensors.append((tensor, tensor.detach().clone(), tensor.grad if tensor.is_leaf else None, tensor.requires_grad))
        return [tensor.grad] if tensor.is_leaf and tensor.grad is not None else []

    def _take_room(self, device: torch.device, num_bytes: int) -> None:
        from ghoststep.instruments.live.snapshot import free_bytes

        if device not in self._room:
            free = free_bytes(device)
            self._room[device] = sys.maxsize if free is None else int(_SPARE_FRACTION * free)
        self._room[device] -= num_bytes
        if self._room[device] < 0:
            raise CannotLook("train_step or loss_fn keeps tensors beside the model, of which no copy fits into memory")

    def guard(self) -> None:
        """Put stand-ins where iterators and files are held."""
        for link in self._links:
            stand_in = None if link.is_absent else _stand_in(link.value, link.name)
            if stand_in is not None:
                link.put(stand_in)
        for container, contents in self._containers:
            pairs = (
                contents.items() if isinstance(contents, dict) else enumerate(contents) if isinstance(contents, list) else ()
            )
            for key, value in [*pairs] if len(contents) <= LARGE else []:
                stand_in = _stand_in(value, repr(key))
                if stand_in is not None:
                    container[key] = stand_in

    def restore(self) -> None:
        """Put everything back; what did not change is not written to."""
        with contextlib.ExitStack() as stages:  # each stage runs, also where one raised
            for source in self._sources:
                stages.callback(source)
            stages.callback(self._restore_values)
            for link in reversed(self._links):
                stages.callback(link.restore)
            for container, contents in self._containers:
                if not same_contents(container, contents):
                    stages.callback(put_contents, container, contents)

    def _restore_values(self) -> None:
        for tensor, value, gradient, flag in self._tensors:
            put_value(tensor, value)
            if tensor.is_leaf:
                if tensor.requires_grad != flag:
                    tensor.requires_grad_(flag)
                if tensor.grad is not gradient:
                    tensor.grad = gradient
        for array, value in self._arrays:
            if array.shape == value.shape and array.tobytes() != value.tobytes():
                array[...] = value


_COPIED: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")))


def _stand_in(value: Any, name: str) -> Any:
    """What takes the place of an iterator or a file meanwhile; None for everything else."""
    import copy

    if isinstance(value, io.IOBase):
        if value in (sys.stdout, sys.stderr, sys.stdin) or value.closed:
            return None
        if value.writable():
            return io.StringIO() if isinstance(value, io.TextIOBase) else io.BytesIO()
        return _Untouchable(name, "a file that is read")
    if isinstance(value, _COPIED):
        return copy.copy(value)
    kind = type(value)
    # An iterator of the user's own class is kept by its attributes.
    if hasattr(kind, "__next__") and not isinstance(value, type) and is_library(kind.__module__):
        return _Untouchable(name, f"a {kind.__name__}")
    return None


class _Untouchable:
    """Stands where something is held that could not be put back: any use of it ends the measurement."""

    def __init__(self, name: str, what: str) -> None:
        self._reason = (
            f"the user's step takes from `{name}`, {what}, which cannot be put back: give it the batches it is called with"
        )

    def __iter__(self) -> Iterator[Any]:
        raise CannotLook(self._reason)

    def __next__(self) -> Any:
        raise CannotLook(self._reason)

    def __getattr__(self, name: str) -> Any:
        raise CannotLook(self._reason)
