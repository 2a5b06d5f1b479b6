"""`ghoststep.watch`: what stands beside a training loop and accounts for every step of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ghoststep.errors import UsageError
from ghoststep.finding import Report
from ghoststep.remedies import clip_events
from ghoststep.watching import given, patches
from ghoststep.watching.building import StepBuilder
from ghoststep.watching.guarding import make_guard
from ghoststep.watching.listening import Listening
from ghoststep.watching.measure import TensorNorms, WeightSample
from ghoststep.watching.newcomers import Newcomers
from ghoststep.watching.reporting import report
from ghoststep.watching.ring import Ring
from ghoststep.watching.run_facts import optimizer_groups, run_facts
from ghoststep.watching.seams import ModelSeams
from ghoststep.watching.setting_up import Wishes, holds_none, make_flusher, make_wishes
from ghoststep.watching.unstarted import Unstarted
from ghoststep.watching.untrained import Untrained
from ghoststep.watching.users_line import users_line

if TYPE_CHECKING:
    import torch

    from ghoststep.watching.rollback import Guard


class Watch(Listening):
    """One model's training, watched. Made by `watch`; a context manager, or `start()` and `close()`.

    refuses_others: a start with optimizers of which none holds a trainable parameter of the model is refused (`UsageError`); False,
    for integrations whose library may train copies of its own: it is a `GhoststepWarning`, and what cannot be seen is unknown.
    """

    refuses_others = True
    _guard: Guard | None = None

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[Any], wishes: Wishes) -> None:
        super().__init__(model, optimizers, wishes)
        self._unstarted = Unstarted(self)

    def start(self) -> Watch:
        """Set the hooks. Refuses at once what cannot work (`UsageError`); after that nothing of ours raises into training, but a
        policy that the user asked for."""
        if self._flusher is not None:
            raise UsageError("this watch was started before; make another one")
        self._unstarted.is_over()
        self._look_at_parameters()
        if why := holds_none(self.model, self.optimizers):
            if self.refuses_others:
                raise UsageError(why)
            users_line().warn_or_log(f"{why}. Meanwhile every check of the optimizer's steps is unknown")
        device = self._parameters[0].device
        sample = WeightSample(self._parameters)
        seams = ModelSeams(self.model, self.faults, self._began_forward, self._looked_up)
        try:
            facts = run_facts(
                self.model, self._names, seams.tables, num_sampled=sample.num_elements, detail=self._wishes.detail,
                tokenizer=self._wishes.tokenizer, scheduler=self._wishes.scheduler,
            )  # fmt: skip
            facts = replace(facts, groups=optimizer_groups(self.optimizers), optimizers=self._optimizer_names())
            self._ring = Ring(capacity=self._wishes.flush_steps, num_parameters=len(self._parameters), device=device)
            self._flusher, first = make_flusher(self._wishes, facts, self.faults, self.optimizers, self.model)
            self._builder = StepBuilder(
                TensorNorms(self._parameters, device), sample, seams.tables, self._ring, first_number=first
            )
            self._newcomers = Newcomers(self.model, self._parameters, is_swapping="FSDP" in facts.parallelism)
            if facts.parallelism in ("", "DDP"):  # a shard may be empty, or zero on one rank only
                self._flusher.untrained = Untrained(self._names, self._parameters, self._newcomers, self.optimizers)
            self._seams = seams
            self._strict = [s for o in self.optimizers if (s := self._strict_for(o)) is not None]
            if self._strict:
                self._builder.early.keeps_measuring()
        except BaseException:
            seams.remove()
            self._give_up()
            raise
        self._flushed_at = time.monotonic()
        self._clip_events = clip_events.listening(self.engaged)
        self._clip_events.__enter__()
        patches.listen(self)
        return self

    def close(self) -> None:
        """Finish: flush, judge, say goodbye to files and sinks, take every hook away. May be called twice."""
        self._unstarted.tell()
        if self._seams is None or self._flusher is None:
            return
        patches.leave(self)
        self._clip_events.__exit__(None, None, None)
        self._seams.remove()
        self._seams = None
        for strict in self._strict:
            if strict.missed:
                error = RuntimeError(f"{strict.missed} steps went past it: something else put its own step() on the optimizer")
                self.faults.keep("strict gate", error)
            self.faults.guarded("strict gate", strict.close)()
        with self._lock:
            self.faults.guarded("closing", self._finish)()
            self.faults.guarded("closing the record", self._flusher.close)()

    def _give_up(self) -> None:
        """A start that was refused leaves nothing behind."""
        for strict in self._strict:
            strict.close()
        if self._flusher is not None:
            self._flusher.close()
        self._flusher = self._seams = None
        self._strict = []

    def _finish(self) -> None:
        assert self._builder is not None
        self._builder.close()
        self._flush()
        if self._guard is not None:
            self._guard.close()

    def __enter__(self) -> Watch:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
        if kind is None and self._flusher is not None:
            self._flusher.policy.raise_pending()

    # What the training loop may ask and tell.

    @property
    def should_stop(self) -> bool:
        """True once a policy "stop" met an alarm: the loop should end."""
        return self.flusher.policy.should_stop

    def step(self, loss: Any = None, batch: Any = None) -> None:
        """Optional, once an iteration: a safe point where a policy "raise" raises.

        batch: what was fed, in the form of a setup's batch, if the model's own arguments do not show it (kept for an alarm of this
        step). loss: not read; a step's loss is what `backward` was called on.
        """
        flusher = self.flusher
        if batch is not None:
            self.faults.guarded("batch", self._keep_batch)(batch, by_loop=True)
        flusher.policy.raise_pending()

    def guard(self, loader: Any, **settings: int) -> Iterator[Any]:
        """`for batch in w.guard(loader):`, which policy "rollback" needs: see the guide on watching. Once a pass over the data.

        settings: every (64 steps between two checkpoints), good_after (64 further steps without an error make one good), compared (8
        steps on each side of the comparison after a rollback; 0 for none). Without such a policy the batches just pass through.
        """
        if self._guard is None:
            more = [self._wishes.scheduler, self._wishes.scaler]
            self._guard = make_guard(self, run_dir=self._wishes.run_dir, saver=self._wishes.saver, stateful=more, **settings)
        return iter(loader) if self._guard is None else self._guard.over(loader)

    def flush(self) -> None:
        """Record and judge everything up to the last finished step, now. Waits for the device once."""
        with self._lock:
            self.flusher.faults.guarded("flush", self._flush)(wait=True)

    def report(self) -> Report:
        """Every check's verdict about the run so far."""
        if self._seams is not None:
            self.flush()
        return report(self.flusher, num_waiting=self.builder.host.num_micro_batches)


def watch(
    model: torch.nn.Module,
    optimizer: Any = None,
    *,
    run_dir: str | Path | None = None,
    policy: str | Mapping[str, str] | None = None,
    strict: bool = False,
    sinks: str | Sequence[Any] = (),
    detail: str = "default",
    tokenizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    saver: Any = None,
    flush_steps: int = 32,
    flush_seconds: float = 5.0,
    keep_batches_bytes: int = 64 << 20,
) -> Watch:
    """Watch a model train: every optimizer step accounted for, every lost one explained.

        with ghoststep.watch(model, optimizer, run_dir="runs/a") as w:
            for batch in loader:
                ...                       # your loop, unchanged
        print(w.report())

    Args:
        model: as it is called in the loop (wrapped by DDP, `fully_shard`, PEFT or torch.compile, or bare).
        optimizer: one, several in a list, or None (found at its first step).
        run_dir: folder for the record, readable by `ghoststep check RUN` after any end of the process; None keeps it in memory.
        policy: what follows an alarm: one word for all errors, or by code, such as `{"GS401": "skip-step", "GS4": "warn"}`; words:
            log (default), warn, stop, raise, skip-step, rollback.
        strict: one read by the host a step, before the optimizer's step; "skip-step" needs it.
        sinks: specs such as "tensorboard:logs" or objects, see `ghoststep.sinks`.
        detail: "default", or "full": every tensor's gradient norm is recorded too.
        tokenizer: to name tokens by their text. scheduler, scaler: told in the record, and saved for a rollback.
        saver: object with `save(path)` and `load(path)`, for rollbacks of what the built-in saver cannot handle.
        flush_steps, flush_seconds: steps are judged and recorded this often, whichever comes first.
        keep_batches_bytes: bound for the copies of the last batches, on the device, kept so that an accused one can be saved.

    Nothing that training computes changes: parameters, gradients, losses and random numbers keep their bits. Nothing is gathered
    between ranks. Cost: one pass over the gradients a step (a second one where another clip than torch's or ours runs), and no
    read by the host between flushes; benchmarks/README.md has figures. A fault of ours ends the hook that had it and is told as
    a broken verdict.

    Raises:
        UsageError: an argument that cannot be used, here; at the start, what cannot work, such as an optimizer that holds no
            parameter of the model. It says what is missing.
    """
    wishes = make_wishes(
        run_dir=run_dir, policy=policy, strict=strict, sinks=sinks, detail=detail, tokenizer=tokenizer, scheduler=scheduler,
        scaler=scaler, saver=saver, flush_steps=flush_steps, flush_seconds=flush_seconds, keep_batches_bytes=keep_batches_bytes,
    )  # fmt: skip
    return Watch(given.model(model), given.optimizers(optimizer), wishes)
