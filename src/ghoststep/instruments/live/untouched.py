"""Observing changes nothing: whatever runs inside `untouched` leaves model, optimizer and randomness bit for bit as they were."""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.instruments.live.kept_attributes import KeptAttributes, keep_randomness, put_value, randomness_behind, same_bits
from ghoststep.instruments.live.kept_batches import KeptBatches, copy_state, restore_state
from ghoststep.instruments.live.side_state import side_state
from ghoststep.subjects.setup import Setup
from ghoststep.undisturbed import undisturbed

if TYPE_CHECKING:
    import torch

_WRITTEN: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
"""Which parameters of a model (by number) its own forward writes into, where that was looked at (`learn`)."""


@contextlib.contextmanager
def untouched(
    subject: torch.nn.Module | Setup, optimizer: Any = None, *, with_values: bool = False, learn: bool = False,
    gradients: bool = True,
) -> Iterator[None]:  # fmt: skip
    """Restore on leaving, also after an exception, an alarm or Ctrl-C: buffers, gradients, modes, requires_grad, plain
    attributes of modules (numbers, tensors, containers), RNG of torch (CPU and CUDA), numpy and Python and of generators that
    modules hold, default dtype, grad mode, anomaly and deterministic modes, and hooks that were removed from a module. Of a
    setup also its batches and the generators that its `loss_fn` and `train_step` refer to.

    `with_values` also restores the parameters' values and the optimizer's state and hyperparameters (for what really steps);
    it costs one copy of both. Without it nothing of ours inside may write to a parameter; a forward of the user's that does
    (`max_norm`, initialisation by the first batch) is undone for the parameters that `learn` has seen it write to: that costs
    one copy of the parameters, once. Buffers and batches are copied (they are small: running statistics, ids). Gradients are
    taken off for the duration (not with `gradients=False`) and put back as the same tensors. Tied and shared tensors are saved
    once. DTensors and FSDP shards are restored shard by shard (values are copied as they are).

    Not known here: what the user's functions and hooks count or keep in variables of their own (a step number in a closure, an
    average of weights). Raises `CannotLook` for lazy modules that no batch has gone through.
    """
    model = subject.model if isinstance(subject, Setup) else subject
    functions = (subject.loss_fn, subject.train_step) if isinstance(subject, Setup) else ()
    kept = _Kept(model, functions, with_values=with_values, learn=learn)
    batches = KeptBatches(subject.batches if isinstance(subject, Setup) else ())
    state = copy_state(optimizer) if with_values and optimizer is not None else None
    try:
        if gradients:
            kept.take_gradients()
        yield
    finally:
        with undisturbed(), contextlib.ExitStack() as stages:  # each stage runs, also where one before it raised
            if state is not None:
                stages.callback(restore_state, optimizer, state)
            stages.callback(batches.restore)
            kept.restore(stages)
    if kept.lost:
        raise CannotLook(f"the model's forward writes into {kept.lost}, of which no copy fits into memory")


@contextlib.contextmanager
def kept_whole(subjects: Sequence[object]) -> Iterator[None]:
    """Around everything that is asked about these subjects: `untouched` for each setup, its gradients left in place.

    Catches what no single measurement undoes: reading an attribute that runs code (a parametrised weight), and hooks of ours
    that an alarm or Ctrl-C left behind. A model that cannot be kept is left to the instruments, which say why.
    """
    with contextlib.ExitStack() as stack:
        for subject in subjects:
            if isinstance(subject, Setup):
                with contextlib.suppress(CannotLook):
                    stack.enter_context(untouched(subject, gradients=False))
                with contextlib.suppress(CannotLook):
                    stack.enter_context(side_state(subject, (subject.loss_fn,)))
                stack.callback(_sweep, subject.model)
        yield


def _sweep(model: torch.nn.Module) -> None:
    """Take hooks of our instruments off that are still there."""
    for owner, names in [*((m, _HOOK_DICTS[:4]) for m in model.modules()), *((p, _TENSOR_HOOKS) for p in model.parameters())]:
        for name in names:
            hooks = getattr(owner, name, None) or {}
            for key in [k for k, h in hooks.items() if str(getattr(h, "__module__", "")).startswith("ghoststep.instruments")]:
                del hooks[key]
                for flags in _HOOK_DICTS[4:] if isinstance(owner, _module_class()) else ():
                    getattr(owner, flags, {}).pop(key, None)


def _module_class() -> type:
    import torch

    return torch.nn.Module


class _Kept:
    """Everything of a model and its surroundings that is put back."""

    def __init__(self, model: torch.nn.Module, functions: Sequence[Any], *, with_values: bool, learn: bool) -> None:

        self.model, self.modules, self.parameters = model, list(model.modules()), list(model.parameters())
        need_made(model)
        self.learn, self.lost = learn, ""
        self.modes = [m.training for m in self.modules]
        self.flags = [p.requires_grad for p in self.parameters]
        self.gradients = [p.grad for p in self.parameters]
        self.buffers = [(m, dict(m._buffers), set(m._non_persistent_buffers_set)) for m in self.modules]
        self.buffer_values = [(b, b.detach().clone()) for _, named, _ in self.buffers for b in named.values() if b is not None]
        self.hooks = [_hooks_of(m) for m in self.modules]
        self.values = {i: self.parameters[i].detach().clone() for i in self._to_copy(with_values)}
        self.versions = [_version(p) for p in self.parameters]
        self.attributes = KeptAttributes(self.modules)
        self.sources = [keep_randomness(r) for r in (*self.attributes.randomness(), *randomness_behind(functions))]
        self.randomness = _random_state()
        self.settings = _settings()

    def _to_copy(self, with_values: bool) -> Sequence[int]:
        everything = range(len(self.parameters))
        if with_values or (self.learn and self.model not in _WRITTEN and _fits(self.parameters)):
            return everything
        bounded = {id(m._parameters.get("weight")) for m in self.modules if getattr(m, "max_norm", None) is not None}
        written = _WRITTEN.get(self.model, frozenset())
        return [i for i in everything if i in written or id(self.parameters[i]) in bounded]

    def take_gradients(self) -> None:
        for p in self.parameters:
            p.grad = None

    def restore(self, stages: contextlib.ExitStack) -> None:
        """Queue the stages; they run last first."""
        for stage in (
            *self.sources, self._randomness, self._parameters, self._buffers, self.attributes.restore, self._modules, self._settings
        ):  # fmt: skip
            stages.callback(stage)

    def _settings(self) -> None:
        _restore_settings(self.settings)

    def _randomness(self) -> None:
        _restore_random(self.randomness)

    def _modules(self) -> None:
        for m, mode, saved in zip(self.modules, self.modes, self.hooks, strict=True):
            m.training = mode
            _restore_hooks(m, saved)

    def _buffers(self) -> None:
        for m, named, passing in self.buffers:
            if list(m._buffers) != list(named) or any(m._buffers[n] is not b for n, b in named.items()):
                m._buffers.clear()
                m._buffers.update(named)
            m._non_persistent_buffers_set.clear()
            m._non_persistent_buffers_set.update(passing)
        for buffer, value in self.buffer_values:
            put_value(buffer, value)

    def _parameters(self) -> None:
        if self.learn and self.model not in _WRITTEN:
            self._learn()
        for i, p in enumerate(self.parameters):
            p.requires_grad_(self.flags[i])
            p.grad = self.gradients[i]
            if i in self.values:
                put_value(p, self.values[i])

    def _learn(self) -> None:
        moved = [
            i for i, p in enumerate(self.parameters)
            if _version(p) != self.versions[i] or (i in self.values and not same_bits(p, self.values[i]))  # .data has no version
        ]  # fmt: skip
        _WRITTEN[self.model] = frozenset(moved)
        lost = next((i for i in moved if i not in self.values), None)
        if lost is not None:
            self.lost = next(name for name, p in self.model.named_parameters() if p is self.parameters[lost])


def need_made(model: torch.nn.Module) -> None:
    """`CannotLook` for a model with lazy parameters or buffers: looking would make them."""
    import torch

    if any(torch.nn.parameter.is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise CannotLook("the model has lazy parameters that are made at its first batch: run one batch through it first")


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() or tensor.is_meta else tensor._version


def _fits(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """A copy of the parameters takes at most a quarter of the memory that is free."""
    from ghoststep.instruments.live.snapshot import free_bytes

    needed: dict[torch.device, int] = {}
    for p in parameters:
        needed[p.device] = needed.get(p.device, 0) + (0 if p.is_meta else p.numel() * p.element_size())
    free = [(free_bytes(device), size) for device, size in needed.items()]
    return all(there is None or size <= there / 4 for there, size in free)


def _settings() -> tuple[Any, ...]:
    import torch

    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    return torch.get_default_dtype(), torch.is_grad_enabled(), deterministic, anomaly


def _restore_settings(settings: tuple[Any, ...]) -> None:
    import torch

    dtype, grad_enabled, deterministic, anomaly = settings
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad_enabled)
    if deterministic != _settings()[2]:
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    if anomaly != _settings()[3]:
        torch.autograd.set_detect_anomaly(*anomaly)


_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def _hooks_of(module: torch.nn.Module) -> dict[str, dict[int, Any]]:
    return {name: dict(getattr(module, name)) for name in _HOOK_DICTS if getattr(module, name, None)}


def _restore_hooks(module: torch.nn.Module, saved: dict[str, dict[int, Any]]) -> None:
    """Put back hooks that were removed. Added ones stay: instruments take theirs off by handle, and a library that installs its
    own at the first forward remembers that it did (transformers' output capturing) and would never install them again."""
    for name in _HOOK_DICTS:
        now = getattr(module, name, None)
        wanted = saved.get(name, {})
        if now is not None and any(key not in now for key in wanted):
            added = {key: hook for key, hook in now.items() if key not in wanted}
            now.clear()
            now.update({**wanted, **added})


def _random_state() -> tuple[Any, ...]:
    import torch

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    numpy_state = None
    if "numpy" in sys.modules:
        import numpy as np

        numpy_state = np.random.get_state()
    return torch.get_rng_state(), cuda, random.getstate(), numpy_state


def _restore_random(state: tuple[Any, ...]) -> None:
    import torch

    cpu, cuda, python, numpy_state = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    if numpy_state is not None:
        import numpy as np

        np.random.set_state(numpy_state)
