"""Batches and optimizer state as they were: user code may pop labels from a batch, and an optimizer rewrites its state."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.instruments.live.kept_attributes import put_value
from ghoststep.subjects.setup_batches import PlacedBatch

if TYPE_CHECKING:
    import torch


class KeptBatches:
    """Entries of batches and the values of their tensors (one copy of each)."""

    def __init__(self, batches: Sequence[Mapping[str, Any]]) -> None:
        import torch

        self._batches = [(b, dict(b)) for b in batches]
        tensors = {id(v): v for _, entries in self._batches for v in entries.values() if isinstance(v, torch.Tensor)}
        self._values = [(t, t.detach().clone(), t.grad) for t in tensors.values()]

    def restore(self) -> None:
        """Put popped, added and replaced entries and overwritten values back."""
        for batch, entries in self._batches:
            same = list(batch) == list(entries) and all(batch[k] is v for k, v in entries.items())
            if not same and isinstance(batch, MutableMapping):
                batch.clear()
                batch.update(entries)
        for tensor, value, gradient in self._values:
            put_value(tensor, value)
            if tensor.grad is not gradient:
                tensor.grad = gradient


def fresh(batch: Any) -> Any:
    """A shallow copy of a batch for the user's code, which may pop entries; what it is (dict, BatchEncoding, tuple) stays."""
    if isinstance(batch, PlacedBatch):
        return batch.as_given()
    return copy.copy(batch) if isinstance(batch, MutableMapping) else batch


class _KeptTensor:
    """A tensor and a copy of its value: restoring writes the value back into the same object, which others may hold."""

    __slots__ = ("tensor", "value")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.value = tensor, tensor.detach().clone()


class _KeptContainer:
    """A dict or list and what stood in it: restoring fills the same object again."""

    __slots__ = ("container", "contents")

    def __init__(self, container: Any, contents: Any) -> None:
        self.container, self.contents = container, contents


def _keep(value: Any) -> Any:
    """Tensors and containers are kept with their contents, everything else (numbers, callables) is taken as it is."""
    import torch

    if isinstance(value, torch.Tensor):
        return _KeptTensor(value)
    if isinstance(value, MutableMapping):
        return _KeptContainer(value, {k: _keep(v) for k, v in value.items()})
    if type(value) is list:
        return _KeptContainer(value, [_keep(v) for v in value])
    if type(value) is tuple:
        return tuple(_keep(v) for v in value) if any(isinstance(v, (torch.Tensor, list, dict)) for v in value) else value
    return value


def _put_back(kept: Any) -> Any:
    if isinstance(kept, _KeptTensor):
        put_value(kept.tensor, kept.value)
        return kept.tensor
    if isinstance(kept, _KeptContainer):
        if isinstance(kept.contents, list):
            kept.container[:] = [_put_back(v) for v in kept.contents]
        else:
            contents = {k: _put_back(v) for k, v in kept.contents.items()}
            kept.container.clear()
            kept.container.update(contents)
        return kept.container
    if type(kept) is tuple:
        return tuple(_put_back(v) for v in kept) if any(isinstance(v, (_KeptTensor, _KeptContainer)) for v in kept) else kept
    return kept


def copy_state(optimizer: Any) -> tuple[Any, ...]:
    """State, groups and plain attributes of an optimizer: one copy of its tensors, none of its parameters."""
    groups = [{k: list(v) if k == "params" else _keep(v) for k, v in g.items()} for g in optimizer.param_groups]
    lists = [g["params"] for g in optimizer.param_groups]
    plain = {k: v for k, v in vars(optimizer).items() if isinstance(v, (bool, int, float))}
    return _keep(optimizer.state), groups, lists, (optimizer.param_groups, list(optimizer.param_groups)), plain


def restore_state(optimizer: Any, saved: tuple[Any, ...]) -> None:
    """Put it back into the same objects; hyperparameters, numbers and flags that were added are taken off again."""
    state, groups, lists, (holder, dicts), plain = saved
    now_state, own = _put_back(state), vars(optimizer)
    holder[:] = dicts
    for name, value in (("state", now_state), ("param_groups", holder)):
        if name in own and own[name] is not value:
            own[name] = value
    for now, then, members in zip(dicts, groups, lists, strict=True):
        for key in set(now) - set(then):
            del now[key]
        members[:] = then["params"]
        now.update({k: members if k == "params" else _put_back(v) for k, v in then.items()})
    for key in [k for k, v in own.items() if isinstance(v, (bool, int, float)) and k not in plain]:
        del own[key]
    own.update(plain)
