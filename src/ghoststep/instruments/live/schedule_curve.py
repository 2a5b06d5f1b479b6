"""The learning rate over a whole run, sampled from the user's scheduler without running it that long."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ghoststep.errors import CannotLook
from ghoststep.instruments.live.optimizers import Held, number
from ghoststep.instruments.live.snapshot import copy_schedule, restore_schedule
from ghoststep.subjects.setup import Setup

NUM_SAMPLES = 4096
"""Points of a curve that can be asked at any step: a warm-up's corner is met to 0.03 % of the run."""

MAX_STEPPED = 20_000
"""Steps of a scheduler that only goes forward."""

FAR = 10_000_000
"""Steps looked ahead at a constant rate when nothing says how long the run is."""

_HORIZONS = ("total_steps", "T_max", "num_training_steps", "max_steps", "max_iters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Learning rates `lrs[i]` at `steps[i]` (ascending from 0). horizon: steps of the run, None if unknown."""

    steps: tuple[int, ...]
    lrs: tuple[float, ...]
    horizon: int | None
    words: str


def schedule_curve(setup: Setup, all_held: Held, index: int) -> Curve:
    """The curve of one group, from now on. Nothing is changed."""
    scheduler = setup.scheduler
    group = all_held.groups[index]
    if scheduler is None:
        lr, horizon = number(group.get("lr")), setup.total_steps
        if not math.isfinite(lr):
            raise CannotLook("the optimizer's learning rate is no number")
        end = horizon or FAR
        return Curve(steps=(0, end), lrs=(lr, lr), horizon=horizon, words=f"constant {lr:g}")
    name = type(scheduler).__name__
    position = _position(scheduler, all_held, index)
    now = max(int(getattr(scheduler, "last_epoch", 0)), 0)
    horizon = setup.total_steps or _horizon(scheduler)
    at = None if position is None else _anywhere(scheduler, position)
    if at is not None and horizon is None:
        horizon = _end_of(at)
    last = horizon if horizon is not None else (FAR if at is not None else MAX_STEPPED)
    if last <= now:
        raise CannotLook(f"the schedule ({name}) has ended: step {now} of {last}")
    if at is not None:
        steps = _samples(now, last)
        lrs = [max(at(s), 0.0) for s in steps]
    else:
        if horizon is None or last - now > MAX_STEPPED:
            raise CannotLook(f"{name} goes forward only, and the run is {'of unknown length' if horizon is None else 'too long'}; "
                             "give total_steps")  # fmt: skip
        lrs = step_ahead(scheduler, all_held, last - now, lambda: number(group.get("lr")))
        steps = list(range(now, now + len(lrs)))
    return Curve(steps=tuple(s - now for s in steps), lrs=tuple(lrs), horizon=None if horizon is None else horizon - now,
                 words=f"{name}, at most {max(lrs):g}")  # fmt: skip


def _samples(now: int, last: int) -> list[int]:
    count = min(NUM_SAMPLES, last - now)
    return sorted({now + round(i * (last - now) / count) for i in range(count + 1)})


def _position(scheduler: Any, all_held: Held, index: int) -> int | None:
    """The group's number inside the scheduler's own optimizer."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    return next((i for i, g in enumerate(groups) if g is all_held.groups[index]), None)


def _anywhere(scheduler: Any, position: int) -> Callable[[int], float] | None:
    """A function from step to learning rate, where the scheduler has one."""
    lambdas, bases = getattr(scheduler, "lr_lambdas", None), getattr(scheduler, "base_lrs", None)
    if lambdas and bases and type(scheduler).__name__ == "LambdaLR":
        return lambda step: float(bases[position]) * float(lambdas[position](step))
    if not hasattr(scheduler, "_get_closed_form_lr"):
        return None

    def ask(step: int) -> float:
        twin = copy.copy(scheduler)  # shares the optimizer; only its own counter is set
        twin.last_epoch = step
        return float(twin._get_closed_form_lr()[position])

    return ask


def _horizon(scheduler: Any) -> int | None:
    """The length that the scheduler was built for."""
    places = [vars(scheduler)]
    for f in getattr(scheduler, "lr_lambdas", None) or ():
        if isinstance(f, functools.partial):
            places.append(f.keywords)
    for place in places:
        for key in _HORIZONS:
            value = place.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    parts = getattr(scheduler, "_schedulers", None)
    if parts and getattr(scheduler, "_milestones", None):
        inner = _horizon(parts[-1])
        return None if inner is None else int(scheduler._milestones[-1]) + inner
    return None


def _end_of(at: Callable[[int], float]) -> int | None:
    """The step from which the rate is 0 (or negative: a straight line beyond its end) for good, looked for at powers of two; None
    if it never ends."""
    high = next((1 << k for k in range(1, 25) if all(at(s) <= 0.0 for s in (1 << k, (1 << k) + 1, 3 << k))), None)
    if high is None:
        return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle) <= 0.0 else (middle, high)
    return high


def step_ahead(scheduler: Any, all_held: Held, count: int, read: Callable[[], float]) -> list[float]:
    """What `read` says now and after each of `count` scheduler steps without the optimizer; both are put back.

    Shorter where the schedule ends before (one cycle); `CannotLook` where it cannot be stepped at all (one that needs a metric).
    """
    rates = [{k: copy.deepcopy(g[k]) for k in ("lr", "initial_lr", "momentum", "betas") if k in g} for g in all_held.groups]
    flags = [{k: v for k, v in vars(o).items() if isinstance(v, (bool, int, float))} for o in all_held.optimizers]
    kept = copy_schedule(scheduler)
    found = [read()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(count):
                scheduler.step()
                found.append(read())
    except Exception as error:
        if len(found) == 1:
            raise CannotLook(f"the scheduler cannot be stepped without more arguments ({type(error).__name__})") from error
    finally:
        restore_schedule(scheduler, kept)
        for group, rate in zip(all_held.groups, rates, strict=True):
            group.update(rate)  # type: ignore[attr-defined]
        for optimizer, flag in zip(all_held.optimizers, flags, strict=True):
            vars(optimizer).update(flag)
    return found
