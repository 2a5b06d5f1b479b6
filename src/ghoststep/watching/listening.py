"""What a watch does when the seams tell it something: steps are put together, closed and flushed."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ghoststep.errors import UsageError
from ghoststep.evidence.steps import UNWATCHED
from ghoststep.watching.building import StepBuilder
from ghoststep.watching.flushing import Flusher
from ghoststep.watching.guarded import Faults
from ghoststep.watching.newcomers import Newcomers
from ghoststep.watching.ring import Ring
from ghoststep.watching.run_facts import argument_names, optimizer_groups
from ghoststep.watching.scaler import found_inf, scale_of
from ghoststep.watching.seams import Lookup, ModelSeams, plain_name
from ghoststep.watching.setting_up import Wishes, make_strict, refuse_untrainable
from ghoststep.watching.strict import StrictStep

if TYPE_CHECKING:
    import torch


logger = logging.getLogger("ghoststep.watch")


class Listening:
    """A `patches.Listener` for one model. `Watch` starts and ends it."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[Any], wishes: Wishes) -> None:
        self.model, self.faults = model, Faults()
        self._wishes = wishes
        self.optimizers: list[Any] = list(optimizers)
        self._found: list[weakref.ref[Any]] = []  # those that nobody named: a loop that makes new ones must not keep the old
        self._look_at_parameters()
        self._lock = threading.RLock()  # forward and backward may run in other threads
        self._argument_names: tuple[str, ...] | None = None
        self._forward_thread: threading.Thread | None = None
        self._backward_thread: int | None = None
        self._strict: list[StrictStep] = []
        self._seams: ModelSeams | None = None
        self._builder: StepBuilder | None = None
        self._ring: Ring | None = None
        self._flusher: Flusher | None = None
        self._flushed_at = 0.0
        self._fed = 0  # the step that the last forward or backward went into
        self._stepped_inside_scaler = False
        self._clip_events: Any = None
        self._has_begun = False
        self._newcomers: Newcomers | None = None
        self._has_flushed = False

    def _look_at_parameters(self) -> None:
        """Those that train now: `fully_shard`, `.to_empty()` and PEFT put others in their place between the making and the start."""
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self._names, self._parameters = [plain_name(n) for n, _ in named], [p for _, p in named]
        self._indices: weakref.WeakKeyDictionary[Any, tuple[int, list[int]]] = weakref.WeakKeyDictionary()
        refuse_untrainable(self._parameters)

    @property
    def flusher(self) -> Flusher:
        """The host's side of this watch."""
        if self._flusher is None:
            raise UsageError(
                "this watch was not started, so that nothing is watched: use it as `with ghoststep.watch(...) as w:`"
            )
        return self._flusher

    @property
    def builder(self) -> StepBuilder:
        """The step that is being put together."""
        assert self._builder is not None
        return self._builder

    def add_optimizer(self, optimizer: Any) -> None:
        """An optimizer that was made after the watch had started. One that steps is found by itself; under a policy "skip-step" it
        has to be told before its first step."""
        if any(o is optimizer for o in self.optimizers) or not self._indices_of(optimizer):
            return
        self.optimizers.append(optimizer)
        self._take_in(optimizer)

    def _take_in(self, optimizer: Any) -> None:
        strict = self._strict_for(optimizer)
        if strict is not None:
            self._strict.append(strict)
        self._tell_facts(groups=optimizer_groups(self._every_optimizer()), optimizers=self._optimizer_names())

    def _tell_facts(self, **changed: Any) -> None:
        """Facts that are known only now."""
        self.flusher.facts = replace(self.flusher.facts, **changed)
        if self.flusher.spool is not None:
            self.flusher.spool.update(self.flusher.facts)

    def _every_optimizer(self) -> list[Any]:
        return [*self.optimizers, *(o for r in self._found if (o := r()) is not None)]

    # What `patches` tells. Nothing of ours raises here.

    def before_backward(self, tensors: Any) -> None:
        """A backward starts."""
        if not self._has_begun and self._flusher is not None:
            self._has_begun = True
            self._flusher.policy.refuse_unguarded()  # at the very start of training, and asked for by the user: this may raise
        self._do("before backward", lambda b: self._begin_backward(b, tensors), here=True)

    def after_backward(self, tensors: Any) -> None:
        """A backward is over."""
        self._do("after backward", lambda b: self._end_backward(b, tensors), here=True)

    def before_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """The scaler is about to step an optimizer, or not."""
        self._stepped_inside_scaler = False
        if self._is_ours(optimizer):
            self._do("scaler", lambda b: b.scaled(scale_of(scaler)))

    def after_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """The scaler is done: without a step in between, the step was skipped."""
        if self._is_ours(optimizer):
            self._do("scaler step", lambda b: self._after_scaler(b, scaler, optimizer))

    def wants_norms(self) -> bool:
        """True if it would use the norms that torch's clip computes."""
        return self._builder is not None and self._builder.early.wants_clips() and not self._is_elsewhere()

    def normed(self, gradients: Sequence[Any], norms: Sequence[Any]) -> None:
        """torch's clip knows these norms."""
        self._do("clip norms", lambda b: b.early.clipped(gradients, norms), here=True)

    def clipped(self, parameters: Any, max_norm: float) -> None:
        """torch clips gradients."""
        self._do("clip", lambda b: b.clipped(parameters, max_norm), here=True)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        if not self._is_ours(optimizer):
            if self._builder is not None:
                self._builder.stepped_elsewhere()
            return
        self._do("optimizer step", lambda b: self._stepped(b, optimizer))
        if self._flusher is not None:
            self._flusher.policy.raise_pending()

    def skipped_by_policy(self, code: str) -> None:
        """A gate of ours did not let the optimizer step."""
        self._do("skipped step", lambda b: b.skipped(by_policy=True))

    def engaged(self, event: Any) -> None:
        """ghoststep's own clip saved or skipped a step."""
        self._do("clip event", lambda b: b.clip_engaged(event.action.value, event.max_norm), here=True)

    # Inner workings.

    def _is_elsewhere(self) -> bool:
        """True in a thread that trains something else while the one that ran our forward lives: our gradients must not be read here,
        since autograd writes to them there without Python's lock."""
        thread = self._forward_thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def _do(self, hook: str, function: Any, *, here: bool = False) -> None:
        """Call a guarded part of ours. here: not in a thread that trains something else."""
        import torch

        def call() -> None:
            with self._lock, torch.no_grad():
                if not (here and self._is_elsewhere()):
                    function(self._builder)

        self.faults.guarded(hook, call)()

    def _began_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        builder = self._builder
        assert builder is not None
        with self._lock, torch.no_grad():
            self._forward_thread = threading.current_thread()
            self._ended_step(builder.has_stepped and builder.close())
            self._fed = builder.number
            self.faults.guarded("batch", self._keep_batch)(self._named_arguments(args, kwargs), by_loop=False)

    def _looked_up(self, lookup: Lookup) -> None:
        assert self._builder is not None
        with self._lock:
            self._forward_thread = threading.current_thread()
            self._builder.lookup(lookup)

    def _named_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model was fed: by name as soon as one argument has one."""
        if not args or not kwargs:
            return kwargs or args
        if self._argument_names is None:
            self._argument_names = argument_names(self.model)
        names = self._argument_names
        return {**{names[i] if i < len(names) else str(i): a for i, a in enumerate(args)}, **kwargs}

    def _begin_backward(self, builder: StepBuilder, tensors: Any) -> None:
        self._backward_thread = threading.get_ident()
        self._ended_step(builder.begin_backward(tensors))

    def _end_backward(self, builder: StepBuilder, tensors: Any) -> None:
        is_whole = self._backward_thread == threading.get_ident()  # not one whose beginning was none of ours
        if is_whole and builder.end_backward(tensors):
            self._fed = builder.number
        self._backward_thread = None

    def _keep_batch(self, batch: Any, *, by_loop: bool) -> None:
        keeper = None if self._flusher is None else self._flusher.keeper
        if keeper is None or self._builder is None:
            return
        if by_loop:  # after a step that a scaler skipped, or a flush in between, the next one is being put together already
            keeper.keep(self._fed or self._builder.number, batch, by_loop=True)
        else:
            keeper.keep(self._builder.number, batch, micro_batch=self._builder.host.num_micro_batches)

    def _stepped(self, builder: StepBuilder, optimizer: Any) -> None:
        self._stepped_inside_scaler = True
        if not any(o is optimizer for o in self._every_optimizer()):
            self._found.append(weakref.ref(optimizer))
            self._take_in(optimizer)
        indices = self._indices_of(optimizer)
        if (untrained := self.flusher.untrained) is not None:
            self.faults.guarded("untrained parameters", untrained.stepped)(optimizer, indices)
        self._ended_step(builder.optimizer_stepped(optimizer, indices))
        assert self._flusher is not None
        self._flusher.take()
        self._look_for_newcomers()

    def _after_scaler(self, builder: StepBuilder, scaler: Any, optimizer: Any) -> None:
        if self._stepped_inside_scaler:
            builder.found_inf = found_inf(scaler, optimizer)
        elif not builder.host.by_policy:
            builder.skipped()
            self._ended_step(builder.close())

    def _ended_step(self, ended: Any) -> None:
        """After a step may have gone into the ring: flush if it is full or old."""
        assert self._ring is not None
        if ended and (self._ring.is_full or time.monotonic() - self._flushed_at > self._wishes.flush_seconds):
            self._flush()

    def _flush(self, *, wait: bool = False) -> None:
        assert self._ring is not None
        assert self._flusher is not None
        self._flushed_at = time.monotonic()
        if wait and self._builder is not None:
            self._builder.close()
        self._flusher.add(self._ring.flush())
        self._flusher.take(wait=wait)
        self._has_flushed = True
        stuck = None if self._builder is None else self._builder.sample.stuck
        if stuck is not None:
            self._tell_unseen("stuck", stuck.reason)

    def _tell_unseen(self, quantity: str, reason: str) -> bool:
        """True if this was not known."""
        unseen = self.flusher.facts.unseen
        if not reason or quantity in unseen:
            return False
        self._tell_facts(unseen={**unseen, quantity: reason})
        return True

    def _look_for_newcomers(self) -> None:
        """After an optimizer step, once a flush: in a forward, functional calls may have lent the modules other tensors."""
        if self._has_flushed and self._newcomers is not None:
            self._has_flushed = False
            said = self._newcomers.told()
            if self._tell_unseen(UNWATCHED, said):
                logger.warning("%s", said)

    def _strict_for(self, optimizer: Any) -> StrictStep | None:
        return make_strict(self, optimizer, self._indices_of(optimizer))

    def _is_ours(self, optimizer: Any) -> bool:
        try:
            return bool(self._indices_of(optimizer))
        except Exception as error:
            self.faults.keep("optimizer", error)
            return False

    def _indices_of(self, optimizer: Any) -> list[int]:
        """Places of the optimizer's parameters among ours. Looked up anew when it gains a group."""
        count = sum(len(g["params"]) for g in optimizer.param_groups)
        known = self._indices.get(optimizer)
        if known is None or known[0] != count:
            place = {id(p): i for i, p in enumerate(self._parameters)}
            found = [place[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in place]
            known = self._indices[optimizer] = (count, found)
        return known[1]

    def _optimizer_names(self) -> tuple[str, ...]:
        return tuple(type(o).__qualname__ for o in self._every_optimizer())
