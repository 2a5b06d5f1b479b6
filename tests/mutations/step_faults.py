"""Faults of parameters, gradients and optimizers (GS4, GS6)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.mutations import harm
from tests.mutations.architectures import (
    Arch,
    Setup,
    V,
    standard,
    tokenizer,
)
from tests.mutations.fault import Fault, Measure
from tests.mutations.planting import (
    embedding,
    head,
    layers,
    on,
    untied,
)

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

    harm.take_steps(broken)
    with tempfile.TemporaryDirectory() as folder:
        broken["save"](broken["model"], folder)
        again = {**broken, "model": broken["load"](folder)}
    batch = broken["batches"][0]
    one, two = harm.outputs(arch, broken, batch), harm.outputs(arch, again, batch)
    return ((one - two).abs().max() / one.std()).item()


def step_fault(
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
    given = {
        "make": make,
        "healthy": healthy,
        "measure": measure,
        "bound": bound,
        "unit": unit,
        "why": why,
        "severity": severity,
    }
    return Fault(name=name, family="steps", codes=codes, **given)


def _checkpoints(arch: Arch) -> bool:
    return arch.intent == "causal" and "tied" not in arch.traits


FAULTS: tuple[Fault, ...] = (
    step_fault(
        "stale_optimizer",
        "",
        on(lambda a: full(a) and a.hf, resized(False)),
        resized(True),
        codes=("GS602", "GS601"),
        why="the old tensor in the optimizer and the new one outside it are one fault",
    ),
    step_fault("embedding_forgotten", "GS601", on(full, embedding_forgotten)),
    step_fault("head_frozen", "GS604", on(untied, head_frozen), severity="warning", why="it may be meant"),
    step_fault("base_without_grad", "GS603", on(lambda a: full(a) and a.intent != "contrastive", base_without_grad)),
    step_fault("reentrant_checkpoints", "GS603", on(_checkpoints, checkpointed(True)), checkpointed(False)),
    step_fault(
        "grad_mode_off", "GS612", on(anything, grad_off), measure=no_graph, bound=1.0, unit="1 if the loss has no graph"
    ),
    step_fault(
        "bf16_small_rate",
        "GS406",
        on(lambda a: full(a) and a.intent == "causal", low_precision(torch.bfloat16)),
        low_precision(torch.float32),
        unmoved_elements,
        0.9,
        "share of the elements with a gradient that four steps do not change",
    ),
    step_fault(
        "embedding_not_saved",
        "GS611",
        on(full, saving(False)),
        saving(True),
        lost_by_saving,
        1e-3,
        "largest change of a logit by saving and loading, in standard deviations",
    ),
)
