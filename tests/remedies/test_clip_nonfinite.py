"""NaN and inf in the gradient: confined to table rows they go, elsewhere the step does not happen."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ghoststep import clip_grad_norm_
from ghoststep.remedies.clip_events import ClipAction, ClipEvent, listening
from ghoststep.remedies.clip_later import tell_waiting
from tests.remedies.clip_models import assert_equal_bits, exact_norm, fill, grad_of, grads, on_device, put, small, table_of

torch.set_num_threads(1)
MODES = ("row", "group", "global")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("route", ["host", "device"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_confined_to_rows(mode: str, route: str, value: float) -> None:
    model = small()
    fill(model, 0.001)
    expected = grads(model.parameters())
    assert expected[0] is not None
    expected[0][[3, 11]] = 0
    table_of(model)[3, 2] = table_of(model)[11, 0] = value
    heard: list[ClipEvent] = []
    with listening(heard.append):
        norm = on_device(model, 1.0, mode) if route == "device" else clip_grad_norm_(model, 1.0, mode)
        tell_waiting()
    assert float(norm) == pytest.approx(exact_norm(expected), rel=1e-5)
    assert_equal_bits(grads(model.parameters()), expected)  # below the bound: all others keep their bits
    assert heard[0].action is ClipAction.REMOVED_ROWS
    assert {r.table_row for r in heard[0].rows} == {3, 11}
    assert "removed non-finite rows" in heard[0].message


@pytest.mark.parametrize("route", ["host", "device"])
def test_removed_rows_and_a_spike_and_an_ordinary_clip_together(route: str) -> None:
    model = small()
    fill(model, 1.0)
    table_of(model)[3] = math.nan
    table_of(model)[5] *= 1e25
    norm = on_device(model, 1.0) if route == "device" else clip_grad_norm_(model, 1.0)
    assert 1e24 < float(norm) < 1e26
    assert (table_of(model)[3] == 0).all()
    assert table_of(model)[5].norm() > 0.1
    assert table_of(model)[6].norm() > 0.01
    assert exact_norm(grads(model.parameters())) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("spike", [False, True])
def test_in_the_trunk_nothing_moves(mode: str, value: float, spike: bool) -> None:
    """AdamW with momentum and decay: a zero gradient would still move every weight."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.1)
    for seed in (1, 2):
        fill(model, 0.1, seed)
        optimizer.step()
    fill(model, 0.1, 3)
    grad_of(model, "2.weight")[4] = value
    if spike:
        table_of(model)[5] *= 1e25
    before = [p.detach().clone() for p in model.parameters()]
    heard: list[ClipEvent] = []
    with listening(heard.append):
        norm = clip_grad_norm_(model, 1.0, mode)
    assert not math.isfinite(float(norm))
    assert [p.grad for p in model.parameters()] == [None] * len(before)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert heard[0].action is ClipAction.SKIPPED
    assert heard[0].worst_trunk == "2.weight"
    assert "2.weight" in heard[0].message


def test_the_device_route_zeroes_what_it_cannot_know_in_time() -> None:
    model = small()
    fill(model, 0.1)
    grad_of(model, "2.weight")[4] = math.nan
    assert math.isnan(float(on_device(model, 1.0)))
    assert all((g == 0).all() for g in grads(model.parameters()) if g is not None)


def test_a_table_of_which_nothing_finite_is_left() -> None:
    """The only trained tensor is NaN throughout: zeros would let stale momentum move it."""
    table = nn.Embedding(2, 4)
    table.weight.grad = torch.full((2, 4), math.nan)
    assert not math.isfinite(float(clip_grad_norm_(nn.Sequential(table), 1.0)))
    assert table.weight.grad is None


@pytest.mark.parametrize("where", ["row", "trunk"])
def test_error_if_nonfinite_raises_before_anything_changes(where: str) -> None:
    model = small()
    fill(model)
    if where == "row":
        table_of(model)[3, 1] = math.nan
    else:
        grad_of(model, "1.bias")[0] = math.inf
    before = grads(model.parameters())
    with pytest.raises(RuntimeError, match="not finite"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert_equal_bits(grads(model.parameters()), before)


def test_error_if_nonfinite_is_silent_where_only_float32_overflows() -> None:
    model = small()
    fill(model, 0.01)
    table_of(model)[3] *= 1e27
    before = grads(model.parameters())
    wanted = clip_grad_norm_(model, 1.0)
    after = grads(model.parameters())
    put(model.parameters(), before)
    assert torch.equal(clip_grad_norm_(model, 1.0, error_if_nonfinite=True), wanted)
    assert_equal_bits(grads(model.parameters()), after)


def test_an_infinite_bound_with_nan_rows() -> None:
    model = small()
    fill(model, 3.0)
    table_of(model)[3] = math.nan
    assert math.isfinite(float(clip_grad_norm_(model, math.inf)))
    assert all(g.isfinite().all() for g in grads(model.parameters()) if g is not None)
