"""Hooks on the model: which ids are looked up, and the gradient that comes back at an embedding's output on this rank.

This gradient is seen before any reduction, so that it names the guilty rank under DDP and FSDP2 too. Every hook returns None
and is guarded; inside a compiled graph and inside a backward (recomputation) they do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.remedies.clip_gradients import is_sharded
from ghoststep.watching.guarded import Faults
from ghoststep.watching.measure import largest_places

if TYPE_CHECKING:
    import torch

MAX_TABLES = 8
"""Embedding modules that are watched; the largest count first."""


@dataclass(slots=True, kw_only=True)
class Lookup:
    """One use of one embedding in a forward. places: [K, 4] of `largest_places` once its gradient came back."""

    table: int
    ids: torch.Tensor
    width: int  # positions of an example
    places: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One watched table: its parameter's name and the modules that look up in it (several where they share it)."""

    name: str
    modules: tuple[Any, ...]

    @property
    def module(self) -> Any:
        """One of the modules."""
        return self.modules[0]

    def readable(self) -> torch.Tensor | None:
        """The table itself where its rows can be read here: a whole floating tensor."""
        weight = self.module.weight
        return weight if weight.is_floating_point() and not is_sharded(weight) else None


def plain_name(name: str) -> str:
    """A parameter's name without what DDP and torch.compile put in front of it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def find_tables(model: torch.nn.Module) -> list[Table]:
    """Embeddings that look up ids: what `get_input_embeddings()` returns, and `nn.Embedding` modules, each table once."""
    import torch

    names = {id(p): plain_name(n) for n, p in model.named_parameters()}
    modules: list[Any] = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    for module in model.modules():
        getter = getattr(module, "get_input_embeddings", None)
        try:
            found = getter() if callable(getter) else None
        except Exception:  # a stranger's model: base classes raise NotImplementedError
            found = None
        if isinstance(found, torch.nn.Module) and getattr(getattr(found, "weight", None), "ndim", 0) == 2:
            modules.insert(0, found)
    sharing: dict[int, list[torch.nn.Module]] = {}
    for module in {id(m): m for m in modules}.values():
        weight = module.weight
        if id(weight) in names and not isinstance(module, torch.nn.EmbeddingBag):
            sharing.setdefault(id(weight), []).append(module)
    tables = [Table(name=names[weight], modules=_outermost(found)) for weight, found in sharing.items()]
    return sorted(tables, key=lambda t: -int(t.module.weight.shape[0]))[:MAX_TABLES]


def _outermost(modules: list[torch.nn.Module]) -> tuple[torch.nn.Module, ...]:
    """Without those inside another one (an adapter around an embedding shows its weight): one lookup must not count twice."""
    inner = {id(i) for m in modules for i in m.modules() if i is not m}
    return tuple(m for m in modules if id(m) not in inner)


class Hook:
    """A hook on a module that leaves copies of the module alone: a copy (deepcopy, pickle, `torch.save`) carries one that does
    nothing, in a pickle one that needs no ghoststep."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes whatever it is given and returns None


def _nothing(*args: Any) -> None:
    """The hook of a copy."""


class ModelSeams:
    """The hooks of one model; `remove` takes them away."""

    def __init__(
        self,
        model: torch.nn.Module,
        faults: Faults,
        on_forward: Callable[[tuple[Any, ...], dict[str, Any]], None],
        on_lookup: Callable[[Lookup], None],
    ) -> None:
        self.tables = find_tables(model)
        self._faults = faults
        self._on_lookup = on_lookup

        def began(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _training():
                on_forward(args, kwargs)

        begin = faults.guarded("forward", began)
        self._handles = [model.register_forward_pre_hook(Hook(begin), with_kwargs=True)]
        for index, table in enumerate(self.tables):
            look = faults.guarded("embedding", self._looking(index))
            self._handles.extend(m.register_forward_hook(Hook(look)) for m in table.modules)

    def remove(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _looking(self, index: int) -> Callable[..., None]:
        def looked_up(module: Any, args: tuple[Any, ...], output: Any) -> None:
            import torch

            if not _training() or not isinstance(output, torch.Tensor) or not output.requires_grad or not args:
                return
            ids = args[0]
            if not isinstance(ids, torch.Tensor) or ids.shape != output.shape[:-1] or ids.numel() == 0:
                return
            # A copy: loaders with fixed buffers write the next batch into the same tensor.
            lookup = Lookup(table=index, ids=ids.detach().clone(), width=ids.shape[-1] if ids.ndim else 1)
            self._on_lookup(lookup)
            output.register_hook(self._faults.guarded("embedding gradient", self._receiving(lookup)))  # type: ignore[no-untyped-call]

        return looked_up

    def _receiving(self, lookup: Lookup) -> Callable[..., None]:
        def received(gradient: torch.Tensor) -> None:
            import torch

            with torch.no_grad():
                weight = self.tables[lookup.table].readable()
                lookup.places = largest_places(gradient, lookup.ids.to(gradient.device), weight)

        return received


def _training() -> bool:
    """True in an ordinary forward that records a graph: not in evaluation, not in recomputation, not while tracing."""
    import torch

    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1
