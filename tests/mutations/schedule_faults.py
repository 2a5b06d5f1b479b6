"""Faults of a training step (GS4) and its schedule (GS6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.mutations import harm
from tests.mutations.architectures import (
    Arch,
    Batch,
    Setup,
    standard,
)
from tests.mutations.fault import Fault
from tests.mutations.planting import (
    on,
)
from tests.mutations.step_faults import anything, step_fault


def rate_zero(arch: Arch) -> Setup:
    """A learning rate of zero."""
    setup = standard(arch)
    for group in setup["optimizer"].param_groups:
        group["lr"] = 0.0
    return setup


def stepping(step: Callable[[Any, Any, Tensor], None]) -> Callable[[Arch], Setup]:
    """A training step that does `step(model, optimizer, loss)` with its loss."""

    def make(arch: Arch) -> Setup:
        setup = standard(arch)

        def train_step(model: Any, optimizer: Any, batch: Batch) -> float:
            loss = setup["loss_fn"](model, batch)
            step(model, optimizer, loss)
            return float(loss.item())

        return {**setup, "train_step": train_step}

    return make


def never_cleared(model: Any, optimizer: Any, loss: Tensor) -> None:
    """Gradients pile up."""
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def cleared_first(model: Any, optimizer: Any, loss: Tensor) -> None:
    """Gradients are gone before they are used."""
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    optimizer.step()


def clipped(bound: float) -> Callable[[Arch], Setup]:
    """Clipping with the given bound."""

    def step(model: Any, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()

    return lambda arch: {**stepping(step)(arch), "max_grad_norm": bound}


def scheduled(steps_it: bool) -> Callable[[Arch], Setup]:
    """A linear warm-up from zero that is stepped, or never is."""

    def make(arch: Arch) -> Setup:
        setup = standard(arch)
        scheduler = torch.optim.lr_scheduler.LambdaLR(setup["optimizer"], lambda s: min(1.0, s / 2))
        inner = setup["train_step"]

        def train_step(model: Any, optimizer: Any, batch: Batch) -> float:
            loss = float(inner(model, optimizer, batch))
            if steps_it:
                scheduler.step()
            return loss

        return {**setup, "train_step": train_step, "scheduler": scheduler}

    return make


def warmed(steps: int) -> Callable[[Arch], Setup]:
    """Adam at a learning rate of 0.3, raised over the first `steps` steps, or at once."""

    def make(arch: Arch) -> Setup:
        setup = standard(arch)
        optimizer = torch.optim.AdamW([p for p in setup["model"].parameters() if p.requires_grad], lr=0.3, weight_decay=0.0)
        inner = setup["train_step"]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / (steps + 1)) * 0.999**s)

        def train_step(model: Any, optimizer: Any, batch: Batch) -> float:
            loss = float(inner(model, optimizer, batch))
            scheduler.step()
            return loss

        return {**setup, "optimizer": optimizer, "train_step": train_step, "scheduler": scheduler}

    return make


def overshoot(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Highest loss of the first five steps over that of the twin, in nats."""
    highest = []
    for setup in (broken, healthy):
        losses = []
        for i in range(5):
            torch.manual_seed(i)
            losses.append(setup["train_step"](setup["model"], setup["optimizer"], setup["batches"][i % 3]))
        highest.append(max(losses[1:]))
    return float(highest[0] - highest[1])


def halves(batch: Batch) -> list[Batch]:
    """The batch in two micro-batches."""
    return [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2)]


def accumulating(per_micro_batch: bool) -> Callable[[Arch], Setup]:
    """A step of two micro-batches; the schedule advances with each, or once."""

    def make(arch: Arch) -> Setup:
        def loss_fn(model: Any, batch: Batch) -> Tensor:
            labels = batch["labels"][:, 1:] if arch.intent == "causal" else batch["labels"]
            loss: Tensor = arch.loss(model, batch) * (labels != -100).sum() / 50  # tokens weigh the same in every micro-batch
            return loss

        setup = standard(arch, loss_fn=loss_fn)
        scheduler = torch.optim.lr_scheduler.LambdaLR(setup["optimizer"], lambda s: 1 / (1 + s))

        def train_step(model: Any, optimizer: Any, batch: Batch) -> float:
            optimizer.zero_grad()
            total = 0.0
            for part in halves(batch):
                loss = loss_fn(model, part)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
                if per_micro_batch:
                    scheduler.step()
            optimizer.step()
            if not per_micro_batch:
                scheduler.step()
            return total

        return {**setup, "train_step": train_step, "scheduler": scheduler, "accumulation_steps": 2}

    return make


def accumulating_calls(per_call: bool) -> Callable[[Arch], Setup]:
    """A step of one micro-batch that updates at every second call; the schedule advances at each, or with the update."""

    def make(arch: Arch) -> Setup:
        twin = accumulating(False)(arch)  # for its loss, in which tokens weigh the same in every micro-batch
        scheduler = torch.optim.lr_scheduler.LambdaLR(twin["optimizer"], lambda s: 1 / (1 + s))
        calls = 0

        def train_step(model: Any, optimizer: Any, batch: Batch) -> float:
            nonlocal calls
            calls += 1
            loss = twin["loss_fn"](model, batch)
            loss.backward()
            is_update = calls % 2 == 0
            if is_update:
                optimizer.step()
                optimizer.zero_grad()
            if per_call or is_update:
                scheduler.step()
            return float(loss.item())

        return {**twin, "train_step": train_step, "scheduler": scheduler}

    return make


def rate_lost(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Share of the learning rate lost against the twin after four steps."""
    for setup in (broken, healthy):
        harm.take_steps(setup)
    return 1 - float(broken["optimizer"].param_groups[0]["lr"] / healthy["optimizer"].param_groups[0]["lr"])


def scaled(backoff: float) -> Callable[[Arch], Setup]:
    """float16 autocast with loss scaling that starts high and comes down by `backoff` at each overflow."""

    def make(arch: Arch) -> Setup:
        setup = standard(arch)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=backoff)

        def loss_fn(model: Any, batch: Batch) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return arch.loss(model, batch)

        def train_step(model: Any, optimizer: Any, batch: Batch) -> float:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            return float(loss.item())

        return {**setup, "loss_fn": loss_fn, "train_step": train_step, "scaler": scaler}

    return make


def anchored(squared: bool) -> Callable[[Arch], Setup]:
    """A penalty on the distance from the first weights, whose root has no gradient at zero (the twin leaves the root out)."""

    def make(arch: Arch) -> Setup:
        model = arch.build()
        name, parameter = next((n, p) for n, p in model.named_parameters() if p.requires_grad)
        start = parameter.detach().clone()

        def loss_fn(model: Any, batch: Batch) -> Tensor:
            distance = (model.get_parameter(name) - start).square().sum()
            loss: Tensor = arch.loss(model, batch) + 1e-3 * (distance if squared else distance.sqrt())
            return loss

        return standard(arch, model=model, loss_fn=loss_fn)

    return make


FAULTS: tuple[Fault, ...] = (
    step_fault("rate_zero", "GS406", on(anything, rate_zero)),
    step_fault(
        "gradients_not_cleared",
        "GS412",
        on(anything, stepping(never_cleared)),
        measure=harm.movement_change,
        bound=0.05,
        unit="norm of the movement's error over four steps, over the norm of the right movement",
    ),
    step_fault("gradients_cleared_first", "GS413", on(anything, stepping(cleared_first))),
    step_fault("clip_bound_zero", "GS610", on(anything, clipped(0.0)), clipped(1.0)),
    step_fault(
        "scheduler_not_stepped",
        "GS608",
        on(anything, scheduled(False)),
        scheduled(True),
        severity="warning",
        why="the loop around may step it",
    ),
    step_fault(
        "scheduler_per_micro_batch",
        "GS609",
        on(lambda a: a.intent != "contrastive", accumulating(True)),
        accumulating(False),
        rate_lost,
        0.1,
        "share of the learning rate that is lost after four steps",
        severity="warning",
        why="the schedule may count micro-batches on purpose",
    ),
    step_fault(
        "scheduler_per_call",
        "GS609",
        on(lambda a: a.intent != "contrastive", accumulating_calls(True)),
        accumulating_calls(False),
        rate_lost,
        0.1,
        "share of the learning rate that is lost after four steps",
        severity="warning",
        why="the schedule may count micro-batches on purpose",
    ),
    step_fault(
        "no_warm_up",
        "GS607",
        on(lambda a: a.intent == "causal", warmed(0)),
        warmed(20),
        overshoot,
        0.1,
        "highest loss of the first steps above the twin's, in nats",
        severity="note",
        why="a rule of thumb",
    ),
    step_fault("scaler_skips_all", "GS407", on(anything, scaled(0.999)), scaled(2.0**-14)),
    step_fault(
        "root_at_zero",
        "GS405",
        on(anything, anchored(False)),
        anchored(True),
        harm.gradient_change,
        0.05,
        "norm of the gradient's error over the right one's; infinite if not finite",
    ),
)
