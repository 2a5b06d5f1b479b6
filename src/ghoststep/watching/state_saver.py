"""Saving and loading everything that training changes, bit for bit, and where that cannot be done."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ghoststep.remedies.clip_gradients import is_sharded

if TYPE_CHECKING:
    import torch


class Saver(Protocol):
    """The user's own way to save and load everything that training changes. The path does not exist yet; it may become a folder."""

    def save(self, path: str) -> Any:
        """Write the state as it is now."""
        ...

    def load(self, path: str) -> Any:
        """Put the saved state back into the same model, optimizer, scheduler, ..."""
        ...


class StateSaver:
    """The built-in saver: trained parameters, all buffers, optimizers, further objects with a state_dict, and random states.

    Loading writes into the tensors that are there, bit for bit, whatever their dtype (`Optimizer.load_state_dict` would cast a
    float32 moment of a bfloat16 weight), and sets gradients to None. stateful: schedulers, a GradScaler, ... Files are read with
    weights_only. For one process and unsharded tensors.
    """

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[Any], stateful: Sequence[Any] = ()) -> None:
        self.model, self.optimizers, self.stateful = model, tuple(optimizers), tuple(stateful)

    def save(self, path: str) -> None:
        """All of it or nothing; OSError or RuntimeError where the disk refuses."""
        import torch

        state = {
            "tensors": {name: t.detach() for name, t in self._tensors()},
            "optimizers": [_optimizer_state(o) for o in self.optimizers],
            "stateful": [s.state_dict() for s in self.stateful],
            "random": _random_states(),
        }
        unfinished = f"{path}.{os.getpid()}"
        try:
            torch.save(state, unfinished)
            os.replace(unfinished, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)

    @staticmethod
    def verify(path: str) -> None:
        """Raise if the file cannot be read back (a scheduler may save objects that weights_only refuses); changes nothing."""
        import torch

        torch.load(path, weights_only=True)

    def load(self, path: str) -> None:
        """Put everything back in place."""
        import torch

        state = torch.load(path, weights_only=True)
        saved = state["tensors"]
        with torch.no_grad():
            for name, tensor in self._tensors():
                tensor.copy_(saved[name])
        for parameter in self.model.parameters():
            parameter.grad = None
        for optimizer, one in zip(self.optimizers, state["optimizers"], strict=True):
            _restore_optimizer(optimizer, one)
        for object_, one in zip(self.stateful, state["stateful"], strict=True):
            object_.load_state_dict(one)
        _restore_random(state["random"])

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        held = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad or id(parameter) in held:
                yield f"parameter {name}", parameter
        for name, buffer in self.model.named_buffers():  # those that state_dict leaves out too
            yield f"buffer {name}", buffer
        ours = {id(p) for p in self.model.parameters()}
        for i, optimizer in enumerate(self.optimizers):  # parameters of a loss, beside the model
            for j, group in enumerate(optimizer.param_groups):
                for k, parameter in enumerate(group["params"]):
                    if id(parameter) not in ours:
                        yield f"optimizer {i} group {j} tensor {k}", parameter


def _optimizer_state(optimizer: Any) -> dict[str, Any]:
    return {
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "state": [
            [dict(optimizer.state[p]) if p in optimizer.state else None for p in g["params"]] for g in optimizer.param_groups
        ],
    }


def _restore_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> None:
    for group, values, states in zip(optimizer.param_groups, saved["groups"], saved["state"], strict=True):
        for key in set(group) - set(values) - {"params"}:
            del group[key]
        for key, value in values.items():
            group[key] = _put(group.get(key), value)
        for parameter, state in zip(group["params"], states, strict=True):
            if state is None:
                optimizer.state.pop(parameter, None)
                continue
            old = optimizer.state.get(parameter, {})
            optimizer.state[parameter] = {k: _put(old.get(k), v) for k, v in state.items()}


def _put(old: Any, new: Any) -> Any:
    """The new value, written into the old tensor where there is one of its kind: others (a CUDA graph) may hold it."""
    import torch

    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype):
        with torch.no_grad():
            return old.copy_(new)
    return new


def _random_states() -> dict[str, Any]:
    import numpy as np
    import torch

    kind, keys, *rest = np.random.get_state()
    uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if uses_cuda else [],
    }


def _restore_random(saved: Mapping[str, Any]) -> None:
    import numpy as np
    import torch

    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(saved["torch"])
    if saved["cuda"]:
        torch.cuda.set_rng_state_all(saved["cuda"])


def cannot_roll_back(
    model: torch.nn.Module,
    optimizers: Sequence[Any],
    *,
    saver: Saver | None,
    scheduler: Any,
    run_dir: Path | None,
    num_ranks: int,
) -> str:
    """Why a rollback cannot work here, with what is missing; "" if it can."""
    if run_dir is None:
        return "it needs run_dir=, a folder for its checkpoints"
    if num_ranks > 1:
        return (
            f"{num_ranks} ranks train together: they would all have to go back at once and leave out equally many batches, which "
            'is not built; use "stop" and restart from a checkpoint'
        )
    if saver is not None:
        lacks = [m for m in ("save", "load") if not callable(getattr(saver, m, None))]
        return f"the saver, a {type(saver).__name__}, has no {' and no '.join(f'{m}(path)' for m in lacks)}" if lacks else ""
    if not optimizers:
        return (
            "the optimizer is not known yet: give it, watch(model, optimizer, ...), or a saver with save(path) and load(path)"
        )
    if any(is_sharded(p) or p.is_meta for p in model.parameters()):
        return "the model is sharded, and only its trainer can save that: give a saver with save(path) and load(path)"
    if scheduler is None and any(hasattr(o.step, "_wrapped_by_lr_sched") for o in optimizers):
        return "a learning-rate scheduler drives the optimizer and would not go back with it: give it too, watch(..., scheduler=...)"
    for optimizer in optimizers:
        known = {id(p) for g in optimizer.param_groups for p in g["params"]}
        if any(id(key) not in known for key in optimizer.state):
            return f"{type(optimizer).__name__} keeps state beside its parameters: give a saver with save(path) and load(path)"
    return ""
