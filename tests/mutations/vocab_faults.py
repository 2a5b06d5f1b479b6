"""Faults of tables and rows (GS0, GS605, GS606)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.mutations import harm
from tests.mutations.architectures import (
    BOS,
    FIRST_WORD,
    Arch,
    Batch,
    Setup,
    V,
    standard,
    tokenizer,
    train_step_of,
)
from tests.mutations.fault import Fault
from tests.mutations.planting import (
    embedding,
    head,
    on,
    untied,
)

REAL = 50


def _words(batch: Batch, limit: int) -> Batch:
    """The batch with all words below `limit`."""
    ids = batch["input_ids"]
    ids = torch.where(ids >= FIRST_WORD, FIRST_WORD + (ids - FIRST_WORD) % (limit - FIRST_WORD), ids)
    return {**batch, "input_ids": ids, "labels": torch.where(batch["labels"] == -100, -100, ids)}


def trained(arch: Arch, batches: list[Batch], steps: int = 60) -> nn.Module:
    """A model that has seen its text for a while, so that its distribution is no longer flat."""
    model = arch.build()
    step, optimizer = train_step_of(arch.loss), torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for i in range(steps):
        torch.manual_seed(i)
        step(model, optimizer, batches[i % len(batches)])
    model.zero_grad()
    return model


def padded_rows(garbage: bool) -> Callable[[Arch], Setup]:
    """64 table rows for 50 tokens; the other 14 come from memory that nobody initialised, or were pushed down by training."""

    def make(arch: Arch) -> Setup:
        batches = [_words(arch.batch(s), REAL) for s in range(3)]
        model = trained(arch, batches)
        if garbage:
            torch.manual_seed(7)
            with torch.no_grad():
                head(model).weight[REAL:] = 4.0 * torch.randn(V - REAL, head(model).weight.shape[1])
        return {**standard(arch, model=model, batches=batches), "tokenizer": tokenizer(REAL)}

    return make


def mass_from(first: int) -> Callable[[Arch, Setup, Setup], float]:
    """Mean probability of the table rows from `first` on, at real positions."""

    def measure(arch: Arch, broken: Setup, healthy: Setup) -> float:
        batch = broken["batches"][0]
        logits = harm.outputs(arch, broken, batch)[harm.real(arch, batch)]
        return logits.softmax(-1)[:, first:].sum(-1).mean().item()

    return measure


def new_rows(by_mean: bool) -> Callable[[Arch], Setup]:
    """Four tokens added to a model whose logits are all far below zero; their rows are fresh noise, or the mean row."""

    def make(arch: Arch) -> Setup:
        batches = [arch.batch(s) for s in range(3)]
        model: Any = trained(arch, batches)
        _lower_all_logits(arch, model, batches[0])
        rows = head(model).weight.detach().mean(0), embedding(model).weight.detach().mean(0)
        torch.manual_seed(8)
        model.resize_token_embeddings(V + 4, mean_resizing=False)
        if by_mean:
            with torch.no_grad():
                head(model).weight[V:], embedding(model).weight[V:] = rows
        for batch in batches:
            batch["input_ids"][0, 5], batch["labels"][0, 5] = V + 1, V + 1
        return {**standard(arch, model=model, batches=batches), "tokenizer": _with_new_tokens()}

    return make


def _with_new_tokens() -> Any:
    made = tokenizer(V)
    made.add_tokens([f"<new{i}>" for i in range(4)])
    return made


def _lower_all_logits(arch: Arch, model: Any, batch: Batch) -> None:
    """Subtract one vector from every head row so that all logits sink together: the softmax does not change."""
    seen: list[Tensor] = []
    handle = head(model).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        arch.logits(model, batch)
    handle.remove()
    hidden = seen[0][harm.real(arch, batch)]
    lowering = torch.linalg.lstsq(hidden, torch.full((len(hidden), 1), 25.0)).solution[:, 0]
    with torch.no_grad():
        head(model).weight -= lowering


def broken_tie(arch: Arch) -> Setup:
    """The flag says tied; the head was loaded from elsewhere into a tensor of its own."""
    model: Any = arch.build()
    other = copy.deepcopy(head(model))
    torch.manual_seed(9)
    with torch.no_grad():
        other.weight += 0.1 * torch.randn_like(other.weight)
    model.set_output_embeddings(other)
    return standard(arch, model=model)


def padding_idx(arch: Arch) -> Setup:
    """`padding_idx` points at BOS, which starts every text: its row gets no gradient."""
    model = arch.build()
    embedding(model).padding_idx = BOS
    return standard(arch, model=model)


def row_gradient_lost(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Share of the gradient of BOS's input row that is lost."""
    rows = []
    for setup in (broken, healthy):
        name = next(n for n, p in setup["model"].named_parameters() if p is embedding(setup["model"]).weight)
        rows.append(harm.gradients(setup)[name][BOS])
    return float((rows[0] - rows[1]).norm() / rows[1].norm())


def decayed_rows(decay: float) -> Callable[[Arch], Setup]:
    """Rows 0..59 are frozen by zeroing their gradient; the optimizer decays (or not)."""

    def make(arch: Arch) -> Setup:
        model = arch.build()
        table = embedding(model).weight
        keep = (torch.arange(V) >= 60)[:, None]
        for p in model.parameters():
            p.requires_grad_(p is table)
        table.register_hook(lambda g: g * keep)  # type: ignore[no-untyped-call]
        setup = standard(arch, model=model)
        return {**setup, "optimizer": torch.optim.AdamW([table], lr=1e-2, weight_decay=decay)}

    return make


def frozen_rows_moved(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Share of their norm that the frozen rows lose in four steps."""
    table = embedding(broken["model"]).weight
    before = float(table.detach()[:60].norm())
    harm.take_steps(broken)
    return 1 - float(table.detach()[:60].norm()) / before


def table_fault(
    name: str, code: str, make: Any, healthy: Any, measure: Any, bound: float, unit: str, family: str = "tables"
) -> Fault:
    return Fault(name=name, family=family, codes=(code,), make=make, healthy=healthy, measure=measure, bound=bound, unit=unit)


FAULTS: tuple[Fault, ...] = (
    table_fault(
        "garbage_padded_rows", "GS003", on(untied, padded_rows(True)), padded_rows(False), mass_from(REAL), 0.3, "probability"
    ),
    table_fault(
        "new_rows_take_mass",
        "GS007",
        on(lambda a: untied(a) and a.hf, new_rows(False)),
        new_rows(True),
        mass_from(V),
        0.3,
        "probability",
    ),
    table_fault(
        "broken_tie",
        "GS006",
        on(lambda a: "tied" in a.traits, broken_tie),
        standard,
        harm.gradient_change,
        0.05,
        "norm of the gradient's error, over the norm of the right gradient",
    ),
    table_fault(
        "padding_idx_on_bos",
        "GS605",
        on(lambda a: a.intent == "causal" and "adapters" not in a.traits, padding_idx),
        standard,
        row_gradient_lost,
        0.1,
        "share of the row's gradient that is lost",
    ),
    table_fault(
        "decay_on_frozen_rows",
        "GS606",
        on(lambda a: a.intent == "causal" and "adapters" not in a.traits, decayed_rows(0.1)),
        decayed_rows(0.0),
        frozen_rows_moved,
        1e-3,
        "share of their norm that frozen rows lose in four steps",
    ),
)
