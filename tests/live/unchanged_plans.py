"""What a setup can look like before it is checked: drawn by hypothesis, made twice from the same seed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from ghoststep.instruments.live.calling import compute_loss
from ghoststep.subjects.setup import make_setup
from tests.live.unchanged_models import FAMILIES

OPTIMIZERS = ("none", "sgd", "momentum", "adamw", "amsgrad", "foreach", "fused", "adafactor", "lbfgs", "two", "wrapped")
SCHEDULES = ("none", "warm-up", "one cycle", "cosine", "sequential", "plateau")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One setup. `mixed_modes`: every second submodule in the other mode. `left`: gradients left over from a backward."""

    family: str
    training: bool = True
    mixed_modes: bool = False
    dtype: torch.dtype = torch.float32
    optimizer: str = "adamw"
    schedule: str = "none"
    scaler: bool = False
    own_step: bool = False
    steps_before: int = 0
    left: bool = False
    frozen: int = 0
    autocast: bool = False
    fast: bool = False
    grad_mode: bool = True
    default_dtype: torch.dtype = torch.float32
    deterministic: bool = False
    anomaly: bool = False
    negative_zeros: bool = False
    accumulation: int = 1
    seed: int = 0


def plans() -> st.SearchStrategy[Plan]:
    rarely = st.sampled_from([False, False, False, True])
    return st.builds(
        Plan,
        family=st.sampled_from(sorted(FAMILIES)), training=st.booleans(), mixed_modes=rarely,
        dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
        optimizer=st.sampled_from(OPTIMIZERS), schedule=st.sampled_from(SCHEDULES), scaler=rarely, own_step=st.booleans(),
        steps_before=st.integers(0, 2), left=st.booleans(), frozen=st.integers(0, 3), autocast=rarely, fast=rarely,
        grad_mode=st.sampled_from([True, True, True, False]), default_dtype=st.sampled_from([torch.float32, torch.float64]),
        deterministic=rarely, anomaly=rarely, negative_zeros=rarely, accumulation=st.sampled_from([1, 1, 2]), seed=st.integers(0, 3),
    )  # fmt: skip


class Wrapper:
    """Keeps the real optimizer as `.optimizer`, as Accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


def _optimizer(kind: str, family: str, parameters: list[torch.nn.Parameter]) -> Any:
    if kind == "none" or not parameters:
        return None
    if family == "sparse gradients":
        return [torch.optim.SparseAdam(parameters[:1], lr=0.01), torch.optim.SGD(parameters[1:], lr=0.1)]
    if kind == "two":
        return [torch.optim.SGD(parameters[::2], lr=0.1, momentum=0.5), torch.optim.AdamW(parameters[1::2], lr=0.01)]
    groups: Any = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.1}]
    made: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1),
        "momentum": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.01),
        "amsgrad": lambda: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False, amsgrad=True),
        "foreach": lambda: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        "fused": lambda: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        "adafactor": lambda: torch.optim.Adafactor(parameters, lr=0.01),
        "lbfgs": lambda: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2, history_size=3),
        "wrapped": lambda: Wrapper(torch.optim.Adam(parameters, lr=0.01)),
    }  # fmt: skip
    return made[kind]()


def _scheduler(kind: str, optimizer: Any) -> Any:
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer.param_groups[0]["lr"], torch.Tensor):
        return None
    s = torch.optim.lr_scheduler
    made: dict[str, Any] = {
        "warm-up": lambda: s.LambdaLR(optimizer, lambda n: min(1.0, n / 4)),
        "one cycle": lambda: s.OneCycleLR(optimizer, 0.02, total_steps=40, cycle_momentum=not isinstance(optimizer, torch.optim.LBFGS)
                                          and "momentum" in optimizer.param_groups[0]),
        "cosine": lambda: s.CosineAnnealingLR(optimizer, 10),
        "sequential": lambda: s.SequentialLR(optimizer, [s.ConstantLR(optimizer), s.ExponentialLR(optimizer, 0.9)], [2]),
        "plateau": lambda: s.ReduceLROnPlateau(optimizer),
    }  # fmt: skip
    return made[kind]() if kind in made else None


def make(plan: Plan) -> dict[str, Any]:
    """The setup of a plan, with everything random seeded: twice made, twice the same."""
    torch.manual_seed(plan.seed)
    np.random.seed(plan.seed)
    random.seed(plan.seed)
    model, batches, loss_fn = FAMILIES[plan.family]()
    model.to(plan.dtype).train(plan.training)
    for m in list(model.modules())[1::2] if plan.mixed_modes else ():
        m.training = not m.training
    for i, p in enumerate(model.parameters()):
        if plan.frozen and i % 4 == plan.frozen:
            p.requires_grad_(False)
        if plan.negative_zeros:
            p.data.view(-1)[::5] = -0.0
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(plan.optimizer, plan.family, trainable)
    given: dict[str, Any] = {"model": model, "batches": batches, "loss_fn": loss_fn, "optimizer": optimizer}
    if plan.autocast:
        inner = loss_fn
        given["loss_fn"] = _autocast(inner)
    given["scheduler"] = _scheduler(plan.schedule, optimizer)
    one = isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, torch.optim.LBFGS)
    if plan.scaler and one and plan.family != "sparse gradients":
        given["scaler"] = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    if (plan.own_step or isinstance(optimizer, torch.optim.LBFGS)) and optimizer is not None:
        given["train_step"] = _own_step(given)
    given["accumulation_steps"] = plan.accumulation
    return given


def _autocast(loss_fn: Any) -> Any:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**batch).loss if loss_fn is None else loss_fn(model, batch)  # type: ignore[no-any-return]

    return loss


def _optimizers(given: dict[str, Any]) -> list[Any]:
    found = given.get("optimizer")
    return found if isinstance(found, list) else [found] if found is not None else []


def one_step(given: dict[str, Any], batch: Any) -> Any:
    """A training step of the user's own: closure, scaler and scheduler as they are."""
    scaler = given.get("scaler")
    loss_of = make_setup({k: given[k] for k in ("model", "loss_fn") if given.get(k) is not None})
    for optimizer in _optimizers(given):
        optimizer.zero_grad()
    if isinstance(given.get("optimizer"), torch.optim.LBFGS):

        def closure() -> Any:
            given["optimizer"].zero_grad()
            loss = compute_loss(loss_of, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loss = given["optimizer"].step(closure)
    else:
        loss = compute_loss(loss_of, batch)
        if loss.requires_grad:
            (loss if scaler is None else scaler.scale(loss)).backward()
            for optimizer in _optimizers(given):
                optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
    scheduler = given.get("scheduler")
    if scheduler is not None:
        scheduler.step(loss.detach()) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else scheduler.step()
    return loss.detach().clone()


def _own_step(given: dict[str, Any]) -> Any:
    rest = {k: v for k, v in given.items() if k not in ("batches", "train_step")}

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        return float(one_step(rest, batch))

    return step


@contextlib.contextmanager
def process(plan: Plan) -> Iterator[None]:
    """The settings of the process that a plan names; the former ones afterwards."""
    before = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        torch.set_default_dtype(plan.default_dtype)
        torch.set_grad_enabled(plan.grad_mode)
        torch.use_deterministic_algorithms(plan.deterministic, warn_only=True)
        torch.autograd.set_detect_anomaly(plan.anomaly)
        yield
    finally:
        torch.set_default_dtype(before[0])
        torch.set_grad_enabled(before[1])
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
