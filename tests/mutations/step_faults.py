"""Faults of gradients, optimizers and schedules (GS4, GS6)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.mutations import harm
from tests.mutations.architectures import Arch, Batch, Setup, V, standard, tokenizer
from tests.mutations.fault import Fault, Measure
from tests.mutations.mask_faults import layers, on
from tests.mutations.vocab_faults import embedding, head, untied

UNMOVED = "share of the twin's moving parameters that do not move in four steps"


def _adamw(parameters: Any, lr: float = 1e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW(list(parameters), lr=lr, weight_decay=0.0)


def full(arch: Arch) -> bool:
    """All parameters are meant to train."""
    return "adapters" not in arch.traits


def anything(arch: Arch) -> bool:
    """Applies everywhere."""
    return True


def resized(first: bool) -> Callable[[Arch], Setup]:
    """The optimizer made before the table is replaced by a larger one, or after."""

    def make(arch: Arch) -> Setup:
        model: Any = arch.build()
        optimizer = _adamw(model.parameters())
        model.resize_token_embeddings(V + 8)
        setup = standard(arch, model=model)
        setup["tokenizer"] = tokenizer(V + 8)
        return setup if first else {**setup, "optimizer": optimizer}

    return make


def embedding_forgotten(arch: Arch) -> Setup:
    """An optimizer over everything but the input embedding."""
    model = arch.build()
    table = embedding(model).weight
    return {**standard(arch, model=model), "optimizer": _adamw(p for p in model.parameters() if p is not table)}


def head_frozen(arch: Arch) -> Setup:
    """The head has lost `requires_grad`, and stands in the optimizer all the same."""
    model = arch.build()
    optimizer = _adamw(model.parameters())
    head(model).weight.requires_grad_(False)
    return {**standard(arch, model=model), "optimizer": optimizer}


def base_without_grad(arch: Arch) -> Setup:
    """The trunk runs under `no_grad`; only the head learns."""
    model: Any = arch.build()
    trunk = model.get_encoder() if arch.intent == "seq2seq" else model.base_model if arch.hf else model.trunk
    trunk = getattr(trunk, "decoder", trunk)
    trunk.forward = torch.no_grad()(trunk.forward)
    return standard(arch, model=model)


def checkpointed(reentrant: bool) -> Callable[[Arch], Setup]:
    """Each layer checkpointed by hand behind a frozen embedding; the head trains."""

    def make(arch: Arch) -> Setup:
        model: Any = arch.build()
        embedding(model).weight.requires_grad_(False)
        if not arch.hf:
            model.trunk.positions.weight.requires_grad_(False)
        head(model).weight.requires_grad_(True)
        for layer in layers(model):
            _checkpoint(layer, reentrant)
        return standard(arch, model=model)

    return make


def _checkpoint(layer: Any, reentrant: bool) -> None:
    forward = layer.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=reentrant)

    layer.forward = changed


def grad_off(arch: Arch) -> Setup:
    """An evaluation that switched gradients off and never on again. The score switches them back."""
    setup = standard(arch)
    torch.set_grad_enabled(False)
    return setup


def no_graph(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """1 if the loss carries no graph in the mode that was left behind."""
    torch.set_grad_enabled(False)
    return float(not broken["loss_fn"](broken["model"], broken["batches"][0]).requires_grad)


def low_precision(dtype: torch.dtype) -> Callable[[Arch], Setup]:
    """LR 1e-6 on weights of the given dtype."""

    def make(arch: Arch) -> Setup:
        model = arch.build().to(dtype)
        trainable = [p for p in model.parameters() if p.requires_grad]
        return {**standard(arch, model=model), "optimizer": _adamw(trainable, 1e-6)}

    return make


def unmoved_elements(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Share of the elements with a gradient that four steps do not change."""
    names = [n for n, g in harm.gradients(healthy).items() if bool((g != 0).any())]
    moved = harm.take_steps(broken)
    still, total = sum(int((moved[n] == 0).sum()) for n in names), sum(moved[n].numel() for n in names)
    return still / total


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


def halves(batch: Batch) -> list[Batch]:
    """The batch in two micro-batches."""
    return [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2)]


def accumulating(per_micro_batch: bool) -> Callable[[Arch], Setup]:
    """A step of two micro-batches; the schedule advances with each, or once."""

    def make(arch: Arch) -> Setup:
        setup = standard(arch)
        scheduler = torch.optim.lr_scheduler.LambdaLR(setup["optimizer"], lambda s: 1 / (1 + s))

        def train_step(model: Any, optimizer: Any, batch: Batch) -> float:
            optimizer.zero_grad()
            total, parts = 0.0, halves(batch)
            for i, part in enumerate(parts):
                loss = setup["loss_fn"](model, part) / len(parts)
                loss.backward()
                total += loss.item()
                if i == len(parts) - 1:
                    optimizer.step()
                if per_micro_batch or i == len(parts) - 1:
                    scheduler.step()
            return total

        return {**setup, "train_step": train_step, "scheduler": scheduler}

    return make


def rate_lost(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Share of the learning rate lost against the twin after four steps."""
    for setup in (broken, healthy):
        harm.take_steps(setup)
    return 1 - broken["optimizer"].param_groups[0]["lr"] / healthy["optimizer"].param_groups[0]["lr"]


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
        name, parameter = [(n, p) for n, p in model.named_parameters() if p.requires_grad][0]
        start = parameter.detach().clone()

        def loss_fn(model: Any, batch: Batch) -> Tensor:
            distance = (model.get_parameter(name) - start).square().sum()
            return arch.loss(model, batch) + 1e-3 * (distance if squared else distance.sqrt())

        return standard(arch, model=model, loss_fn=loss_fn)

    return make


def saving(everything: bool) -> Callable[[Arch], Setup]:
    """`save` keeps all that trains, or leaves the input embedding out."""

    def make(arch: Arch) -> Setup:
        setup = standard(arch)
        table = next(n for n, p in setup["model"].named_parameters() if p is embedding(setup["model"]).weight)

        def save(model: Any, folder: str) -> None:
            state = {k: v for k, v in model.state_dict().items() if everything or k != table}
            torch.save(state, Path(folder) / "model.pt")

        def load(folder: str) -> nn.Module:
            model = arch.build()
            model.load_state_dict(torch.load(Path(folder) / "model.pt"), strict=False)
            return model

        return {**setup, "save": save, "load": load}

    return make


def lost_by_saving(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """After four steps: largest change of a logit by saving and loading, in standard deviations."""
    import tempfile

    harm.take_steps(broken)
    with tempfile.TemporaryDirectory() as folder:
        broken["save"](broken["model"], folder)
        again = {**broken, "model": broken["load"](folder)}
    batch = broken["batches"][0]
    one, two = harm.outputs(arch, broken, batch), harm.outputs(arch, again, batch)
    return ((one - two).abs().max() / one.std()).item()


def _fault(
    name: str,
    code: str,
    make: Any,
    healthy: Any = standard,
    measure: Measure = harm.unmoved_share,
    bound: float = 0.01,
    unit: str = UNMOVED,
    codes: tuple[str, ...] = (),
    why: str = "",
    severity: str = "error",
) -> Fault:
    codes = codes or (code,)
    given = {"make": make, "healthy": healthy, "measure": measure, "bound": bound, "unit": unit, "why": why, "severity": severity}
    return Fault(name=name, family="steps", codes=codes, **given)


def _checkpoints(arch: Arch) -> bool:
    return arch.intent == "causal" and "tied" not in arch.traits


FAULTS: tuple[Fault, ...] = (
    _fault(
        "stale_optimizer",
        "",
        on(lambda a: full(a) and a.hf, resized(False)),
        resized(True),
        codes=("GS602", "GS601"),
        why="the old tensor in the optimizer and the new one outside it are one fault",
    ),
    _fault("embedding_forgotten", "GS601", on(full, embedding_forgotten)),
    _fault("head_frozen", "GS604", on(untied, head_frozen), severity="warning", why="it may be meant"),
    _fault("base_without_grad", "GS603", on(lambda a: full(a) and a.intent != "contrastive", base_without_grad)),
    _fault("reentrant_checkpoints", "GS603", on(_checkpoints, checkpointed(True)), checkpointed(False)),
    _fault("grad_mode_off", "GS612", on(anything, grad_off), measure=no_graph, bound=1.0, unit="1 if the loss has no graph"),
    _fault(
        "bf16_small_rate",
        "GS406",
        on(lambda a: full(a) and a.intent == "causal", low_precision(torch.bfloat16)),
        low_precision(torch.float32),
        unmoved_elements,
        0.9,
        "share of the elements with a gradient that four steps do not change",
    ),
    _fault("rate_zero", "GS406", on(anything, rate_zero)),
    _fault(
        "gradients_not_cleared",
        "GS412",
        on(anything, stepping(never_cleared)),
        measure=harm.movement_change,
        bound=0.05,
        unit="norm of the movement's error over four steps, over the norm of the right movement",
    ),
    _fault("gradients_cleared_first", "GS413", on(anything, stepping(cleared_first))),
    _fault("clip_bound_zero", "GS610", on(anything, clipped(0.0)), clipped(1.0)),
    _fault("scheduler_not_stepped", "GS608", on(anything, scheduled(False)), scheduled(True), severity="warning", why="the loop around may step it"),
    _fault(
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
    _fault("scaler_skips_all", "GS407", on(anything, scaled(0.999)), scaled(2.0**-14)),
    _fault(
        "root_at_zero",
        "GS405",
        on(anything, anchored(False)),
        anchored(True),
        harm.gradient_change,
        0.05,
        "norm of the gradient's error over the right one's; infinite if not finite",
    ),
    _fault(
        "embedding_not_saved",
        "GS611",
        on(full, saving(False)),
        saving(True),
        lost_by_saving,
        1e-3,
        "largest change of a logit by saving and loading, in standard deviations",
    ),
)
