"""GS307 against real optimizers and schedules: predicted crossing within 1 % of a simulated one, silent where nothing decays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ghoststep
from ghoststep.finding import Outcome, Verdict

V, D = 40, 16
OPTIMIZER: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.2}


class Recurrent(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.mix(self.embed(input_ids))[0])
        return logits


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(
        model(batch["input_ids"])[:, :-1].flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten()
    )


def setup(model: nn.Module, optimizer: Any, **more: Any) -> dict[str, Any]:
    ids = torch.randint(2, 20, (2, 8), generator=torch.Generator().manual_seed(1))
    return {"model": model, "batch": {"input_ids": ids}, "loss_fn": loss_fn, "optimizer": optimizer, **more}


def gs307(**given: Any) -> Verdict:
    report = ghoststep.check(select=("GS307",), **given)
    return next(v for v in report.verdicts if v.code == "GS307")


def made(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Recurrent(tied=tied)


Make = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: dict[str, Make | None] = {
    "constant": None,
    "linear with warm-up": lambda o: torch.optim.lr_scheduler.LambdaLR(
        o, lambda t: (t + 1) / 100 if t < 100 else max(0.0, 1 - (t - 100) / 3900)
    ),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4000),
    "cosine to a tenth": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4000, eta_min=0.005),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.06, total_steps=4000),
}


def simulated(make: Make | None, line: float, kind: Callable[..., Any] = torch.optim.AdamW) -> int:
    """Steps until a never-fed row of the same table is under the line: a real optimizer, zero gradients."""
    model = made()
    row = nn.Parameter(model.embed.weight.detach().clone())  # type: ignore[union-attr,operator]
    optimizer = kind([row], **OPTIMIZER)
    scheduler = make(optimizer) if make else None
    start = float(row.detach().norm(dim=1).median())
    scale = start
    for step in range(1, 4001):
        row.grad = torch.zeros_like(row)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        scale = float(row.detach().norm(dim=1).median())
        if scale <= line:
            return step
    raise AssertionError(f"never crossed: {start} to {scale}")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_crossing_is_predicted_within_one_percent(name: str) -> None:
    make = SCHEDULES[name]
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    scheduler = make(optimizer) if make else None
    found = gs307(**setup(model, optimizer, scheduler=scheduler, total_steps=4000))
    assert found.outcome is Outcome.FOUND
    predicted = found.findings[0].where.step
    actual = simulated(make, 1e-6)
    assert predicted is not None
    assert abs(predicted - actual) <= 0.01 * actual


def test_sgd_with_momentum_is_measured_too() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5, **OPTIMIZER)
    found = gs307(**setup(model, optimizer, total_steps=4000))
    predicted = found.findings[0].where.step
    actual = simulated(None, 1e-6, lambda p, **k: torch.optim.SGD(p, momentum=0.5, **k))
    assert predicted is not None
    assert abs(predicted - actual) <= 0.01 * actual


def test_bf16_without_master_weights_rounds_the_decay_away() -> None:
    model = made().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    found = gs307(**setup(model, optimizer, total_steps=10**6))
    assert found.outcome is Outcome.NOT_APPLICABLE
    assert "rounds away" in (found.reason or "")
    row = nn.Parameter(torch.rand(64).bfloat16() + 0.5)  # and so it is: 200 real steps change nothing
    before = row.detach().clone()
    twin = torch.optim.AdamW([row], lr=1e-3, weight_decay=0.1)
    for _ in range(200):
        row.grad = torch.zeros_like(row)
        twin.step()
    assert torch.equal(row.detach(), before)


def test_master_weights_of_a_bf16_model_decay() -> None:
    model = made().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    found = gs307(**setup(model, torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.1), total_steps=10**6))
    assert found.outcome is Outcome.FOUND


@pytest.mark.parametrize("case", ["tied", "no decay", "frozen", "no optimizer"])
def test_not_applicable(case: str) -> None:
    model = made(tied=case == "tied")
    if case == "frozen":
        model.embed.weight.requires_grad_(False)  # type: ignore[union-attr]
    decay = 0.0 if case == "no decay" else 0.2
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=decay)
    found = gs307(**setup(model, None if case == "no optimizer" else optimizer, total_steps=4000))
    assert found.outcome is Outcome.NOT_APPLICABLE


def test_a_short_run_is_clear_and_says_its_power() -> None:
    model = made()
    found = gs307(**setup(model, torch.optim.AdamW(model.parameters(), **OPTIMIZER), total_steps=1000))
    assert found.outcome is Outcome.CLEAR
    assert found.power is not None


def test_a_run_of_unknown_length_is_unknown_only_where_it_matters() -> None:
    model = made()
    assert gs307(**setup(model, torch.optim.AdamW(model.parameters(), **OPTIMIZER))).outcome is Outcome.UNKNOWN
    usual = torch.optim.AdamW(model.parameters(), lr=1e-3)  # decay 0.01: 1.4 million steps
    assert gs307(**setup(model, usual)).outcome is Outcome.CLEAR


def test_a_line_that_goes_below_zero_ends_there() -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 4000)
    found = gs307(**setup(model, optimizer, scheduler=scheduler))
    assert found.outcome is Outcome.FOUND
    assert "of 4,000" in found.findings[0].message


def test_looking_leaves_scheduler_and_optimizer_as_they_were() -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.06, total_steps=400)
    before = (scheduler.last_epoch, optimizer.param_groups[0]["lr"], torch.get_rng_state().clone())
    gs307(**setup(model, optimizer, scheduler=scheduler))
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert not optimizer.state
    assert math.isfinite(before[1])
