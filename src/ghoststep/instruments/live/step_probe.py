"""A few real training steps on the real objects, watched, and undone bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.evidence.base import Missing
from ghoststep.evidence.training import LiveWiring, ParameterSteps, RowSteps, StepProbe
from ghoststep.instruments.live.calling import LiveCall, compute_loss, eager, unwrap
from ghoststep.instruments.live.kept_batches import fresh
from ghoststep.instruments.live.optimizers import Held, held, number
from ghoststep.instruments.live.snapshot import need_room, real_steps, unique_tensors
from ghoststep.instruments.live.step_watch import StepWatch, TensorTrace
from ghoststep.instruments.live.users_errors import as_it_is, required, users_code
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

ENOUGH_STEPS, NUM_STEPS = 2, 3
"""Gradients left over show at the second step. A third where the second still had learning rate 0 (a warm-up), or with a scaler
(it may skip the first ones)."""
MAX_CALLS = 12
TYPICAL_OF = 1 << 16
AHEAD = 64
"""Scheduler steps looked ahead: does the learning rate ever leave 0?"""


@instrument
def step_probe(setup: Setup, wiring: LiveWiring, call: LiveCall | Missing) -> StepProbe:
    """Run the user's train_step (or zero_grad, loss, backward, clip, step) two or three times or over two accumulation windows.

    Batches are used in turn. Parameters, optimizer, scheduler, scaler, randomness and modes are put back bit for bit, and what
    train_step and loss_fn keep beside them (a counter, an average of weights; see `side_state`). `CannotLook` without optimizer
    or batch, with `--fast`, where copies do not fit, and when the user's code raises.
    Cost: that many training steps and one copy of parameters and optimizer state.
    """
    all_held = held(setup.optimizer)
    if not all_held.optimizers:
        raise CannotLook("the setup has no optimizer")
    if not setup.batches:
        raise CannotLook("the setup has no batch")
    if setup.fast:
        raise CannotLook("--fast takes no optimizer steps")
    if isinstance(call, Missing) and call.cannot_run:
        raise CannotLook(call.reason)
    if not wiring.grad_mode_before:
        raise CannotLook(wiring.gradient_reason)
    if setup.train_step is None and wiring.gradient_reason:
        raise CannotLook(wiring.gradient_reason)
    if setup.accumulation_steps > MAX_CALLS:
        raise CannotLook(f"{setup.accumulation_steps} micro-batches make a step; at most {MAX_CALLS} are run")
    need_room(setup.model, all_held)
    return _Probe(setup, wiring, all_held).run()


class _Probe:
    """One run of the probe; values are read before everything is put back."""

    def __init__(self, setup: Setup, wiring: LiveWiring, all_held: Held) -> None:
        self.setup, self.wiring, self.held = setup, wiring, all_held
        core, _ = unwrap(setup.model)
        self.names = {id(p): name for name, p in core.named_parameters()}
        self.parameters = dict(core.named_parameters())
        self.tensors = unique_tensors(list(all_held.tensors()))
        self.num_calls = 0

    def run(self) -> StepProbe:
        import torch

        setup, scheduler = self.setup, self.setup.scheduler
        tables = frozenset(id(self.parameters[t.parameter]) for t in self.wiring.tables)
        with real_steps(setup, self.held, scheduler, setup.scaler) as before:
            watch = StepWatch(self.held, self.tensors, tables)
            scale_before, count_before = _scale(setup.scaler), _count(scheduler)
            try:
                self._calls(watch)
                mode_after = torch.is_grad_enabled()
            finally:
                watch.remove()
            scale_after, count_after = _scale(setup.scaler), _count(scheduler)
            scales = None if scale_before is None or scale_after is None else (scale_before, scale_after)
            return StepProbe(
                is_users=setup.train_step is not None,
                num_calls=self.num_calls,
                steps=tuple(watch.steps),
                parameters=tuple(
                    self._parameter(i, t, watch, before[id(t)])
                    for i, t in self.tensors
                    if id(t) in self.names and t.requires_grad
                ),
                rows=tuple(r for r in (self._rows(name, watch, before) for name in self._table_names()) if r is not None),
                num_skipped=_num_skipped(setup, scales, self.num_calls, len(watch.steps)),
                scales=scales,
                scheduler_steps=None if count_before is None or count_after is None else count_after - count_before,
                scheduler_is_bound=_is_bound(scheduler, self.held),
                lrs_ahead=_ahead(scheduler, self.held),
                changed_outside=self._changed_outside(before),
                grad_mode_after=mode_after,
                accumulation_steps=setup.accumulation_steps,
            )

    def _calls(self, watch: StepWatch) -> None:
        setup = self.setup
        wanted = min(max(NUM_STEPS, 2 * setup.accumulation_steps), MAX_CALLS)
        for i in range(MAX_CALLS):
            if len(watch.steps) >= (ENOUGH_STEPS if self._is_enough(watch) else NUM_STEPS):
                break  # before `wanted` too: one call may do a whole accumulation window
            if i >= wanted and (watch.steps or setup.scaler is not None):
                break  # beyond that only a train_step that has not stepped yet: it may accumulate without saying so
            watch.calls_since_step += 1
            self.num_calls += 1
            number = i % len(setup.batches)
            with eager():
                if setup.train_step is not None:
                    with as_it_is(setup, f"your train_step (call {i + 1})", number=number):
                        setup.train_step(setup.model, setup.optimizer, fresh(setup.batches[number]))
                else:
                    with users_code():
                        self._own_step(number)

    def _is_enough(self, watch: StepWatch) -> bool:
        """The last step trained something, and every step so far came with a call: none was skipped or accumulated unsaid."""
        is_moving = bool(watch.steps) and any(lr > 0 or math.isnan(lr) for lr in watch.steps[-1].lrs)
        return is_moving and self.setup.scaler is None and len(watch.steps) >= self.num_calls / self.setup.accumulation_steps

    def _own_step(self, number: int) -> None:
        import torch

        setup = self.setup
        for optimizer in self.held.optimizers:
            optimizer.zero_grad()
        with as_it_is(setup, number=number):
            loss = compute_loss(setup, setup.batches[number])
        (loss if setup.scaler is None else setup.scaler.scale(loss)).backward()
        for optimizer in self.held.optimizers:
            if setup.scaler is not None:
                setup.scaler.unscale_(optimizer)
            if setup.max_grad_norm is not None and setup.max_grad_norm > 0:
                torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], setup.max_grad_norm)
            if required(optimizer.step):
                raise CannotLook(f"{type(optimizer).__name__}.step wants a closure: give train_step(model, optimizer, batch)")
            with as_it_is(setup, f"{type(optimizer).__name__}.step", number=number):
                optimizer.step() if setup.scaler is None else setup.scaler.step(optimizer)
        if setup.scaler is not None:
            setup.scaler.update()
        if setup.scheduler is not None:  # one that watches a metric gets the loss
            wants = required(getattr(setup.scheduler, "scheduler", setup.scheduler).step)
            setup.scheduler.step(*([loss.detach()] if wants else []))

    def _table_names(self) -> Sequence[str]:
        return [t.parameter for t in self.wiring.tables]

    def _parameter(self, group: int, t: torch.Tensor, watch: StepWatch, old: torch.Tensor) -> ParameterSteps:
        import torch

        trace: TensorTrace = watch.traces[id(t)]
        changed = t.detach() != old
        num_changed = int(changed.count_nonzero())
        lost = int((trace.pushed & ~changed).count_nonzero()) if trace.pushed is not None else 0
        difference = torch.linalg.vector_norm(t.detach() - old, ord=math.inf) if num_changed else 0.0
        return ParameterSteps(
            name=self.names[id(t)],
            dtype=str(t.dtype).removeprefix("torch."),
            group=group,
            norms=tuple(trace.norms),
            num_elements=t.numel(),
            num_pushed=trace.num_pushed,
            num_changed=num_changed,
            num_lost=lost,
            max_change=float(difference),
            leftover=trace.leftover,
            largest_gradient=max((n for n in trace.norms if math.isfinite(n)), default=0.0),
            typical_value=_typical(old),
            kept_state=watch.draws_random or self._keeps_more(t),
        )

    def _keeps_more(self, t: torch.Tensor) -> bool:
        import torch

        for optimizer in self.held.optimizers:
            kept = optimizer.state.get(t, {}).values() if hasattr(optimizer, "state") else ()
            same = [v for v in kept if isinstance(v, torch.Tensor) and v.shape == t.shape and v.dim() > 0]
            own = type(optimizer).__module__.partition(".")[0] == "torch"
            if len(same) > (3 if own else 2) or (not own and any(v.dtype != t.dtype and v.is_floating_point() for v in same)):
                return True
        return False

    def _rows(self, name: str, watch: StepWatch, before: dict[int, torch.Tensor]) -> RowSteps | None:
        p = self.parameters[name]
        trace = watch.traces.get(id(p))
        signal = next(t for t in self.wiring.tables if t.parameter == name)
        if trace is None or trace.zero_R is None or bool(trace.zero_R.all()):
            return None
        rows = [i for i in signal.fed_rows if i < len(trace.zero_R) and bool(trace.zero_R[i])]
        old = before[id(p)][rows].double().norm(dim=1)
        new = p.detach()[rows].double().norm(dim=1)
        kept = [(i, float(n / o)) for i, o, n in zip(rows, old, new, strict=True) if float(o) > 0]
        if not kept:
            return None
        group = next(i for i, t in self.tensors if t is p)
        return RowSteps(parameter=name, group=group, rows=tuple(i for i, _ in kept), ratios=tuple(r for _, r in kept))

    def _changed_outside(self, before: dict[int, torch.Tensor]) -> tuple[str, ...]:
        import torch

        inside = {id(t) for _, t in self.tensors}
        return tuple(
            name for name, p in self.parameters.items() if id(p) not in inside and not torch.equal(p.detach(), before[id(p)])
        )


def _typical(values: torch.Tensor) -> float:
    """The median magnitude of at most `TYPICAL_OF` elements, evenly spread; 0 of none."""
    flat = values.detach().reshape(-1)
    few = flat[:: max(1, flat.numel() // TYPICAL_OF)]
    return float(few.float().abs().median()) if few.numel() else 0.0


def _num_skipped(setup: Setup, scales: tuple[float, float] | None, num_calls: int, num_steps: int) -> int:
    if scales is None:
        return 0
    return max(0, num_calls // max(1, setup.accumulation_steps) - num_steps)


def _scale(scaler: Any) -> float | None:
    return number(scaler.get_scale()) if scaler is not None and hasattr(scaler, "get_scale") else None


def _count(scheduler: Any) -> int | None:
    inner = getattr(scheduler, "scheduler", scheduler)
    count = getattr(inner, "last_epoch", None)
    return count if isinstance(count, int) else None


def _is_bound(scheduler: Any, all_held: Held) -> bool:
    bound = getattr(getattr(scheduler, "scheduler", scheduler), "optimizer", None)
    return bound is None or any(bound is o or o in held(bound).optimizers for o in all_held.optimizers)


def _ahead(scheduler: Any, all_held: Held) -> float:
    """The largest learning rate over the next scheduler steps; called while everything will be put back."""
    import warnings

    if scheduler is None or not hasattr(scheduler, "step"):
        return math.nan
    largest = max((number(g.get("lr")) for g in all_held.groups), default=math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(AHEAD):
            try:
                scheduler.step()
            except Exception:  # a schedule that needs a metric, or that has ended
                break
            largest = max(largest, *(number(g.get("lr")) for g in all_held.groups))
    return largest
