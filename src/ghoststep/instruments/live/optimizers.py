"""The optimizers of a setup as plain groups of tensors, whatever wraps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.evidence.training import OptimizerGroup

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The parameter groups of all optimizers, numbered through: `groups[i]` and `owners[i]` belong together."""

    optimizers: tuple[Any, ...]
    groups: tuple[Mapping[str, Any], ...]
    owners: tuple[Any, ...]

    def tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Every tensor with the number of its group."""
        for index, group in enumerate(self.groups):
            for tensor in group["params"]:
                yield index, tensor


def held(given: Any) -> Held:
    """One optimizer, a list of them, None, or a wrapper that keeps the real one as `.optimizer` (Accelerate) or `.optimizers`."""
    optimizers = tuple(o for one in (given if isinstance(given, (list, tuple)) else (given,)) for o in _inner(one))
    groups = [(g, o) for o in optimizers for g in o.param_groups]
    return Held(optimizers=optimizers, groups=tuple(g for g, _ in groups), owners=tuple(o for _, o in groups))


def _inner(one: Any) -> Iterator[Any]:
    for _ in range(8):
        if isinstance(getattr(one, "optimizers", None), (list, tuple)):
            for part in one.optimizers:
                yield from _inner(part)
            return
        # A wrapper may derive from torch's Optimizer and still keep all state in the one it wraps.
        wrapped = getattr(one, "optimizer", None)
        if wrapped is None or not hasattr(wrapped, "param_groups"):
            break
        one = wrapped
    if one is not None and hasattr(one, "param_groups"):
        yield one


def group_facts(all_held: Held) -> tuple[OptimizerGroup, ...]:
    """Learning rate, decay and size of every group as they stand now."""
    return tuple(
        OptimizerGroup(
            index=i,
            optimizer=type(owner).__name__,
            lr=number(group.get("lr")),
            initial_lr=number(group["initial_lr"]) if "initial_lr" in group else None,
            weight_decay=number(group.get("weight_decay", 0.0)),
            num_tensors=len(group["params"]),
            num_frozen=sum(1 for p in group["params"] if not p.requires_grad),
        )
        for i, (group, owner) in enumerate(zip(all_held.groups, all_held.owners, strict=True))
    )


def number(value: Any) -> float:
    """A float of a number or a one-element tensor; NaN for anything else (Adafactor's lr may be None)."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def holds_copies(all_held: Held, trainable: Sequence[torch.Tensor]) -> bool:
    """True where the optimizer holds none of the model's parameters but as many tensors of the same sizes: master weights."""
    mine = {id(p) for p in trainable}
    tensors = [t for _, t in all_held.tensors()]
    if not tensors or not trainable or any(id(t) in mine for t in tensors):
        return False
    same_shapes = sorted(tuple(t.shape) for t in tensors) == sorted(tuple(p.shape) for p in trainable)
    same_size = sum(t.numel() for t in tensors) == sum(p.numel() for p in trainable)
    other_type = {t.dtype for t in tensors} != {p.dtype for p in trainable}
    return (same_shapes or same_size) and other_type


def watch_steps(all_held: Held, after: Callable[[Any], None]) -> Callable[[], None]:
    """Call `after(optimizer)` at the end of every `step()`; returns what undoes it. A step that a GradScaler skips does not
    come here."""
    undo: list[Callable[[], None]] = []
    for optimizer in all_held.optimizers:
        if hasattr(optimizer, "register_step_post_hook"):
            undo.append(optimizer.register_step_post_hook(lambda stepped, *_: after(stepped)).remove)
        else:
            undo.append(_wrap_step(optimizer, after))

    def undo_all() -> None:
        for run in undo:
            run()

    return undo_all


def _wrap_step(optimizer: Any, after: Callable[[Any], None]) -> Callable[[], None]:
    had = "step" in vars(optimizer)
    original = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        after(optimizer)
        return result

    def undo() -> None:
        if had:
            optimizer.step = original
        else:
            del optimizer.step

    optimizer.step = step
    return undo
