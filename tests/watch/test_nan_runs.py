"""Real loops whose loss or gradients are no numbers: what is said of them, of the steps before and of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ghoststep.evidence.steps import StepOutcome
from ghoststep.finding import Finding, Outcome, Severity, Verdict
from tests.watch.loops import TinyLM, Watch, next_token_loss, steps_of, tokens, watch

Loss = Callable[[nn.Module, Tensor, int], Tensor]
COMPARING = ("GS402", "GS405", "GS406", "GS408", "GS409", "GS410", "GS418", "GS419")


def plain(model: nn.Module, ids: Tensor, number: int) -> Tensor:
    return next_token_loss(model(ids), ids)


def train(
    loss_of: Loss = plain,
    *,
    steps: int = 40,
    model: nn.Module | None = None,
    make: Any = None,
    scaler: Any = None,
    clip: bool = True,
) -> tuple[Watch, nn.Module]:
    """The usual loop; `number` counts from 1."""
    torch.manual_seed(0)
    model = TinyLM() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if make is None else make(model.parameters())
    with watch(model, optimizer, flush_steps=8) as w:
        for number in range(1, steps + 1):
            optimizer.zero_grad()
            loss = loss_of(model, tokens(number), number)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    return w, model


def verdict(w: Watch, code: str) -> Verdict:
    return w.report().verdict(code)


def finding(w: Watch, code: str) -> Finding:
    (one,) = verdict(w, code).findings
    return one


def is_sound(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def nan_at(*numbers: int, value: float = math.nan) -> Loss:
    return lambda model, ids, number: plain(model, ids, number) * (value if number in numbers else 1.0)


def test_a_run_that_is_nan_is_clear_of_nothing_that_was_not_compared() -> None:
    w, model = train(nan_at(31), steps=110)
    assert not is_sound(model)
    one = finding(w, "GS404")
    assert (one.severity, one.where.step) == (Severity.ERROR, 31)
    assert "stepped on NaN or infinity in 28 of 28 gradient tensors in step 31; it still is NaN in step 110" in one.message
    for code in COMPARING:
        said = verdict(w, code)
        assert said.outcome is Outcome.UNKNOWN, code
        assert "80 of 110 steps could not be compared: the loss is NaN from step 31 on" in str(said.reason)


def test_one_nan_step_leaves_the_others_compared() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    w, model = train(nan_at(31), steps=110, scaler=scaler)
    assert is_sound(model)
    assert finding(w, "GS404").severity is Severity.WARNING
    for code in COMPARING:
        said = verdict(w, code)
        assert said.outcome is Outcome.CLEAR, (code, said.reason)
        assert "1 of 110 steps could not be compared: the loss is NaN in step 31" in str(said.reason) or code == "GS402"
    calm, _ = train(steps=110)
    for code in COMPARING:
        said = verdict(calm, code)
        assert (said.outcome, "compared" in str(said.reason)) == (Outcome.CLEAR, False)


def ignored(model: nn.Module, ids: Tensor, number: int) -> Tensor:
    """Every label of step 9 is ignored: a mean over nothing."""
    labels = torch.full_like(ids[:, 1:], -100) if number == 9 else ids[:, 1:]
    return functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels.flatten())


def overflowing(model: nn.Module, ids: Tensor, number: int) -> Tensor:
    """In step 9 the loss is NaN by a constant, and one row makes the norm overflow: the clip zeroes what it had."""
    loss = plain(model, ids, number)
    return loss + math.nan + 1e25 * model.embed.weight[7].sum() if number == 9 else loss  # type: ignore[union-attr,index]


@pytest.mark.parametrize("loss", [ignored, overflowing])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_what_moves_the_weights_without_a_gradient(loss: Loss, kind: str) -> None:
    w, model = train(loss, make=lambda p: torch.optim.AdamW(p, lr=1e-3) if kind == "AdamW" else torch.optim.SGD(p, lr=1e-2))
    assert is_sound(model)
    one = finding(w, "GS404")
    assert (one.severity, one.where.step) == (Severity.WARNING, 9)
    assert "every gradient that the optimizer was given was exactly zero" in one.message
    moved = steps_of(w)[8].moved
    assert moved is not None
    assert (moved > 0) == (kind == "AdamW")
    assert ("the weights stood still" if kind == "SGD" else f"moved the weights by {moved:.2g} of their norm") in one.message
    assert "Go back" not in one.message


@pytest.mark.parametrize("init_scale", [32768.0, 65536.0])
def test_a_loss_in_fp16_that_overflows_only_times_its_scale(init_scale: float) -> None:
    """A loss of shape [1] keeps its type when the scaler multiplies: 4.2 x 32768 is infinite, the gradient of it is not."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)
    w, model = train(lambda model, ids, number: plain(model, ids, number).half().reshape(1), scaler=scaler)
    assert is_sound(model)
    steps = steps_of(w)
    assert sum(s.outcome is StepOutcome.SKIPPED_BY_SCALER for s in steps) == (1 if init_scale == 65536.0 else 0)
    assert all(s.loss == math.inf for s in steps)
    said = verdict(w, "GS404")
    assert said.outcome is Outcome.UNKNOWN
    assert "40 of 40 steps could not be compared: the loss times its loss scale is infinite" in str(said.reason)
    small = torch.amp.GradScaler("cpu", init_scale=1024.0)
    w, _ = train(lambda model, ids, number: plain(model, ids, number).half().reshape(1), scaler=small)
    assert verdict(w, "GS404").outcome is Outcome.CLEAR


def test_an_infinite_loss_that_the_optimizer_stepped_on_stays_found() -> None:
    w, model = train(nan_at(9, value=math.inf), steps=12)
    assert not is_sound(model)
    assert finding(w, "GS404").severity is Severity.ERROR


class Poison(torch.autograd.Function):
    """Spoils the gradient of the places that a mask names; the forward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, value: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return torch.where(mask[..., None], ctx.value, grad), None, None


def poisoned(value: float, example: int | None, position: int | None) -> Loss:
    """In step 9 the gradient behind the embedding is this at one place, or at all of them."""

    def loss_of(model: nn.Module, ids: Tensor, number: int) -> Tensor:
        if number != 9:
            return plain(model, ids, number)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[slice(None) if example is None else example, slice(None) if position is None else position] = True

        def spoil(module: nn.Module, given: Any, out: Tensor) -> Tensor:
            spoilt: Tensor = Poison.apply(out, mask, value)  # type: ignore[no-untyped-call]
            return spoilt

        handle = model.embed.register_forward_hook(spoil)  # type: ignore[union-attr]
        loss = plain(model, ids, number)
        handle.remove()
        return loss

    return loss_of


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_place_whose_gradient_is_not_finite_is_named(value: float) -> None:
    w, _ = train(poisoned(value, 2, 5), steps=12)
    one = finding(w, "GS405")
    token = int(tokens(9)[2, 5])
    where = one.where
    assert (where.step, where.example, where.position, where.table_row, where.token_id) == (9, 2, 5, token, token)
    assert where.parameter == "embed.weight"
    assert f"got a gradient of {value:g} at position 5 of example 2 (micro-batch 0) in step 9 on rank 0" in one.message


def test_where_every_place_is_nan_none_is_blamed() -> None:
    w, _ = train(poisoned(math.nan, None, None), steps=12)
    one = finding(w, "GS405")
    assert (one.where.step, one.where.table_row, one.where.position) == (9, None, None)
    assert "No place of the batch stands out" in one.message


class Lengths(nn.Module):
    """Each place by itself, with the length of its vector as a feature: the root at zero has a NaN gradient and a finite value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(17, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        out: Tensor = self.head(torch.cat([x, x.square().sum(-1, keepdim=True).sqrt()], dim=-1))
        return out


def test_a_row_of_zeros_under_a_root_is_named() -> None:
    model = Lengths()
    token = int(tokens(1)[0, 8])
    assert (tokens(1) == token).nonzero().tolist() == [[0, 8], [3, 0], [3, 9]]
    with torch.no_grad():
        model.embed.weight[token] = 0.0
    w, _ = train(model=model, steps=3)
    one = finding(w, "GS405")
    assert (one.where.step, one.where.table_row) == (1, token)
    assert f"Table row {token} of embed.weight (norm 0) got a gradient of nan at position" in one.message
    for place in ("position 8 of example 0", "position 0 of example 3", "position 9 of example 3"):
        assert one.message.count(place) == 1
    assert "other places of the batch got a finite one" in one.message


def test_a_model_without_an_embedding_has_no_row_that_could_crush_a_step() -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))
    w, _ = train(lambda model, ids, number: model(ids.float() / 64).square().mean(), model=model)
    said = verdict(w, "GS402")
    assert (said.outcome, said.reason) == (Outcome.NOT_APPLICABLE, "the model has no embedding table")


def test_nor_has_one_whose_embedding_is_frozen_or_trains_alone() -> None:
    frozen = TinyLM()
    frozen.embed.weight.requires_grad_(False)
    w, _ = train(model=frozen)
    said = verdict(w, "GS402")
    assert (said.outcome, said.reason) == (Outcome.NOT_APPLICABLE, "the model has no embedding table that trains")
    alone = TinyLM().requires_grad_(False)
    alone.embed.weight.requires_grad_(True)
    w, _ = train(model=alone)
    said = verdict(w, "GS402")
    assert said.outcome is Outcome.NOT_APPLICABLE
    assert "nothing but embedding tables trains" in str(said.reason)
