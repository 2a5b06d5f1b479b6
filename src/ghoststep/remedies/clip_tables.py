"""Which parameters are embedding tables."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@functools.cache
def _known() -> MutableMapping[torch.Tensor, bool]:
    """Parameters of bare lists that were looked up, weakly held, and whether each is a table."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def named_tables(model: torch.nn.Module) -> dict[int, str]:
    """id(parameter) → name for every table of a model: weights of `nn.Embedding` and `nn.EmbeddingBag` (position and type tables
    too), and of what `get_input_embeddings()` returns, whatever its class. A tied table appears once, under its first name."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {id(p): names[id(p)] for module in model.modules() for p in _tables_of(module) if id(p) in names}


def _tables_of(module: torch.nn.Module) -> list[torch.Tensor]:
    import torch

    found: list[torch.Tensor] = []
    if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        found.append(module.weight)
    getter = getattr(module, "get_input_embeddings", None)
    if callable(getter):
        try:
            weight = getattr(getter(), "weight", None)
        except Exception:  # a stranger's model: many base classes raise NotImplementedError
            weight = None
        if isinstance(weight, torch.nn.Parameter) and weight.ndim == 2:
            found.append(weight)
    return found


def tables_among(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    """The tables in a bare list of parameters: those that a living `nn.Embedding` or `nn.EmbeddingBag` holds.

    A list does not say what its tensors are for, so all living modules are asked (0.1 s in a process with a million objects),
    once for each parameter: a clip needs this on spike steps only. Name: the position in the list.
    """
    known = _known()
    unknown = [p for p in parameters if p.ndim == 2 and p not in known]
    if unknown:
        held = {id(p) for p in _held_by_embeddings()}
        for p in unknown:
            known[p] = id(p) in held
    return {id(p): f"parameters[{i}]" for i, p in enumerate(parameters) if known.get(p, False)}


def _held_by_embeddings() -> Iterable[torch.nn.Parameter]:
    import torch

    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    for thing in gc.get_objects():
        if issubclass(type(thing), kinds) and isinstance(weight := thing.__dict__.get("_parameters", {}).get("weight"),
                                                         torch.nn.Parameter):  # fmt: skip
            yield weight
