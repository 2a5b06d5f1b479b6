"""Feeds a loss chosen model outputs: the model's forward is replaced for the duration, so that no forward is paid for."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.instruments.live.calling import LiveCall, compute_loss, eager
from ghoststep.instruments.live.untouched import untouched
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

Place = tuple[int, "str | int | None"]
"""Which call of the model, and the key or index in its output (None: the output itself)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """The outputs that may be embeddings: their places, in order, and their values (float, [B, D] or [B, T, D])."""

    places: tuple[Place, ...]
    values: tuple[torch.Tensor, ...]


def find_embeddings(call: LiveCall) -> Embeddings:
    """Every floating [B, D] or [B, T, D] output but the logits; the largest B of all calls counts."""
    import torch

    found: list[tuple[Place, torch.Tensor]] = []
    for number, one in enumerate(call.calls):
        for key, value in _items(one.output):
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() not in (2, 3):
                continue
            classes = call.num_classes if call.head is not None else call.num_table_rows
            is_logits = value.dim() == 3 and value.shape[-1] == classes
            if not is_logits and min(value.shape[0], value.shape[-1]) > 1:
                found.append(((number, key), value.detach()))
    most = max((v.shape[0] for _, v in found), default=0)
    kept = [(p, v) for p, v in found if v.shape[0] == most]
    return Embeddings(places=tuple(p for p, _ in kept), values=tuple(v for _, v in kept))


def floats(output: Any) -> list[torch.Tensor]:
    """The floating tensors among a model's outputs."""
    import torch

    return [v for _, v in _items(output) if isinstance(v, torch.Tensor) and v.is_floating_point()]


def _items(output: Any) -> Iterator[tuple[str | int | None, Any]]:
    import torch

    if isinstance(output, torch.Tensor):
        yield None, output
    elif isinstance(output, Mapping):
        yield from output.items()
    elif isinstance(output, (tuple, list)):
        yield from enumerate(output)
    elif hasattr(output, "__dict__"):
        yield from vars(output).items()


class FedLoss:
    """`loss(leaves)` of the user's own loss, with these tensors in the embeddings' places and all else as it was measured."""

    def __init__(self, setup: Setup, call: LiveCall, places: Sequence[Place]) -> None:
        self._setup, self._call, self._places = setup, call, places
        self._leaves: Sequence[torch.Tensor] = ()
        self._next = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[FedLoss]:
        """Replace the forward meanwhile; everything is put back."""
        core = self._call.core
        had, original = "forward" in vars(core), vars(core).get("forward")
        with untouched(self._setup.model), eager():
            try:
                core.forward = self._forward
                yield self
            finally:
                if had:
                    vars(core)["forward"] = original
                else:
                    del core.forward

    def _forward(self, *_: Any, **__: Any) -> Any:
        number = self._next
        self._next += 1
        if number >= len(self._call.calls):
            raise CannotLook("the loss calls the model more often than it did before")
        output = self._call.calls[number].output
        for (where, key), leaf in zip(self._places, self._leaves, strict=True):
            if where == number:
                output = _replaced(output, key, leaf)
        return output

    def __call__(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The scalar loss, with a graph to the leaves."""
        import torch

        self._leaves, self._next = leaves, 0
        with torch.enable_grad():
            return compute_loss(self._setup, self._setup.batches[0])


def _replaced(output: Any, key: str | int | None, value: torch.Tensor) -> Any:
    if key is None:
        return value
    if isinstance(output, tuple):
        items = [value if i == key else v for i, v in enumerate(output)]
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    changed = copy.copy(output)
    if isinstance(changed, (dict, list)) or hasattr(changed, "__setitem__"):
        changed[key] = value
    else:
        setattr(changed, str(key), value)
    return changed
