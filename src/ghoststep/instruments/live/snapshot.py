"""Values of parameters, optimizer, scheduler and scaler, kept while real steps are taken, and put back bit for bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.instruments.live.kept_attributes import put_value
from ghoststep.instruments.live.kept_batches import copy_state, restore_state
from ghoststep.instruments.live.optimizers import Held
from ghoststep.instruments.live.side_state import side_state
from ghoststep.instruments.live.untouched import untouched
from ghoststep.subjects.setup import Setup
from ghoststep.undisturbed import undisturbed

if TYPE_CHECKING:
    import torch

_SPARE_FRACTION = 0.8
"""Share of the memory that is free now which the copies and the new state may take together."""


@contextlib.contextmanager
def real_steps(
    subject: torch.nn.Module | Setup, all_held: Held, scheduler: Any = None, scaler: Any = None
) -> Iterator[dict[int, torch.Tensor]]:
    """Inside, real optimizer steps may be taken; yields the values before, by `id` of the tensor.

    Restored on leaving, also after an exception: what `untouched` restores, the values and gradients of the model's and the
    optimizer's tensors, the optimizers' state and hyperparameters, scheduler and scaler. Cost: one copy of all of these.
    """

    model = subject.model if isinstance(subject, Setup) else subject
    tensors = _all_tensors(model, all_held)
    mine = {id(p) for p in model.parameters()}
    outside = [t for t in tensors if id(t) not in mine]
    gradients = [t.grad for t in outside]
    before = {id(t): t.detach().clone() for t in tensors}
    states = [copy_state(o) for o in all_held.optimizers]
    schedule, scale = copy_schedule(scheduler), _copy_scaler(scaler)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(untouched(subject))
            if isinstance(subject, Setup):
                stack.enter_context(side_state(subject, (subject.train_step, subject.loss_fn)))
            for t in outside:
                t.grad = None
            yield before
    finally:
        with undisturbed():
            for t in tensors:
                put_value(t, before[id(t)])
            for t, gradient in zip(outside, gradients, strict=True):
                t.grad = gradient
            for optimizer, state in zip(all_held.optimizers, states, strict=True):
                restore_state(optimizer, state)
            restore_schedule(scheduler, schedule)
            _restore_scaler(scaler, scale)


def _all_tensors(model: torch.nn.Module, all_held: Held) -> list[torch.Tensor]:
    unique: dict[int, torch.Tensor] = {id(p): p for p in model.parameters()}
    unique.update((id(t), t) for _, t in all_held.tensors())
    return list(unique.values())


def need_room(model: torch.nn.Module, all_held: Held) -> None:
    """`CannotLook` unless parameters and optimizer state fit twice into the memory that is free now, device by device.

    New state is estimated as two tensors a parameter of the optimizer (Adam); existing state is counted as it is.
    """
    import torch

    needed: dict[torch.device, int] = {}

    def add(t: torch.Tensor, times: int) -> None:
        needed[t.device] = needed.get(t.device, 0) + times * t.numel() * t.element_size()

    for t in _all_tensors(model, all_held):
        if t.is_meta:
            raise CannotLook("the parameters are on the meta device: no step can be taken")
        add(t, 1)
    for optimizer in all_held.optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    add(p, 1)  # its gradient
                kept = [v for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
                for v in kept:
                    add(v, 1)
                if not kept and p.requires_grad:
                    add(p, 2)
    for device, num_bytes in needed.items():
        free = free_bytes(device)
        if free is not None and num_bytes > _SPARE_FRACTION * free:
            raise CannotLook(
                f"a real optimizer step needs {num_bytes / 2**30:.1f} GiB on {device} for copies and state, and "
                f"{free / 2**30:.1f} GiB are "
                "free: parameters and state do not fit twice"
            )


def free_bytes(device: torch.device) -> int | None:
    """Memory that can be had now on a device; None where it cannot be told."""
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            line = next(text for text in file if text.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return None


def copy_schedule(scheduler: Any) -> Any:
    if scheduler is None:
        return None
    if hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict"):
        return copy.deepcopy(scheduler.state_dict())
    return {k: copy.copy(v) if isinstance(v, (list, dict)) else v for k, v in vars(scheduler).items()}


def restore_schedule(scheduler: Any, saved: Any) -> None:
    if scheduler is None:
        return
    if hasattr(scheduler, "load_state_dict"):
        scheduler.load_state_dict(saved)
        return
    for key in set(vars(scheduler)) - set(saved):
        delattr(scheduler, key)
    vars(scheduler).update(saved)


_SCALER_FIELDS = ("_scale", "_growth_tracker")


def _copy_scaler(scaler: Any) -> dict[str, Any] | None:
    import torch

    if scaler is None:
        return None
    fields = {k: v for k, v in vars(scaler).items() if k not in ("_per_optimizer_states",)}
    values = {k: v.clone() for k, v in fields.items() if isinstance(v, torch.Tensor)}
    stages = {k: copy.copy(v) for k, v in getattr(scaler, "_per_optimizer_states", {}).items()}
    return {"fields": fields, "values": values, "stages": stages}


def _restore_scaler(scaler: Any, saved: dict[str, Any] | None) -> None:
    if scaler is None or saved is None:
        return
    vars(scaler).update(saved["fields"])
    for key, value in saved["values"].items():
        getattr(scaler, key).copy_(value)
    if hasattr(scaler, "_per_optimizer_states"):
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update(saved["stages"])


def unique_tensors(tensors: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    """Each tensor once, with the first group that holds it."""
    seen: dict[int, tuple[int, torch.Tensor]] = {}
    for index, t in tensors:
        seen.setdefault(id(t), (index, t))
    return list(seen.values())
