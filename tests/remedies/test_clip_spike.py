"""Magnitudes from 1e-38 to 3e38: never all zeros from a gradient that is not, never an infinite norm that could be written."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ghoststep import clip_grad_norm_
from tests.remedies.clip_models import exact_norm, grads, on_device, put, small, table_of

torch.set_num_threads(1)
MODES = ("row", "group", "global")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LARGEST = {torch.float16: math.log10(6e4), torch.float32: 38.4, torch.bfloat16: 38.4, torch.float64: 38.4}
EPS = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-10}


def draw_gradients(model: nn.Module, draw: st.DrawFn) -> None:
    """Each tensor, and a few rows of the table, in a magnitude of its own."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    for p in model.parameters():
        size = 10.0 ** draw(st.floats(-38, LARGEST[p.dtype]))
        p.grad = ((torch.rand(p.shape, generator=generator, dtype=torch.float64) - 0.5) * size).to(p.dtype)
    table = table_of(model)
    for row in draw(st.lists(st.integers(0, len(table) - 1), max_size=4)):
        size = 10.0 ** draw(st.floats(-38, LARGEST[table.dtype]))
        table[row] = ((torch.rand(table.shape[1], generator=generator, dtype=torch.float64) - 0.5) * size).to(table.dtype)


@given(
    data=st.data(), dtype=st.sampled_from(DTYPES), rows=st.integers(1, 30), width=st.integers(1, 8), mode=st.sampled_from(MODES),
    max_norm=st.sampled_from((0.01, 1.0, 100.0)), route=st.sampled_from(("model", "list", "device")),
)  # fmt: skip
@settings(deadline=None, max_examples=120)
def test_any_magnitude(
    data: st.DataObject, dtype: torch.dtype, rows: int, width: int, mode: str, max_norm: float, route: str
) -> None:
    model = small(rows, width, dtype)
    data.draw(st.composite(lambda draw: draw_gradients(model, draw))())
    parameters = list(model.parameters())
    true = exact_norm(grads(parameters))
    norm = (
        on_device(model, max_norm, mode) if route == "device"
        else clip_grad_norm_(model if route == "model" else parameters, max_norm, mode)
    )  # fmt: skip
    after = exact_norm(grads(parameters))
    if true <= torch.finfo(norm.dtype).max * (1 - EPS[dtype]):  # what the returned dtype can hold
        assert math.isfinite(float(norm))
    if route != "device":
        assert math.isfinite(float(norm))  # float64 where float32 cannot hold it
    if true > 1e-18 or dtype == torch.float64:  # torch's own float32 squares vanish below, and its value is returned
        assert float(norm) == pytest.approx(true, rel=EPS[dtype]) or not math.isfinite(float(norm))
    # float16: torch's coefficient is subnormal there, and imprecise
    limit = (math.sqrt(2) if mode == "group" else 1.0) * (1.7 if dtype == torch.float16 else 1)
    assert after <= limit * max_norm * (1 + 60 * EPS[dtype]) or after <= true * (1 + EPS[dtype]) < max_norm
    if true > 1e-4:  # the clipped gradient has elements that its dtype can hold
        assert after > 0


@given(rows=st.integers(1, 30), width=st.integers(1, 8), exponent=st.floats(-38, 38.4), mode=st.sampled_from(MODES))
@settings(deadline=None, max_examples=60)
def test_one_magnitude_for_everything(rows: int, width: int, exponent: float, mode: str) -> None:
    """Nothing stands out, so the clipped gradient points where the true one does."""
    model = small(rows, width)
    generator = torch.Generator().manual_seed(rows)
    for p in model.parameters():
        p.grad = (torch.rand(p.shape, generator=generator) + 0.5) * 0.6 * 10.0**exponent
    before = torch.cat([g.double().flatten() for g in grads(model.parameters()) if g is not None])
    clip_grad_norm_(model, 1.0, mode)
    after = torch.cat([g.double().flatten() for g in grads(model.parameters()) if g is not None])
    top = before.max()
    if mode != "group":
        torch.testing.assert_close(after / after.max(), before / top, rtol=1e-4, atol=1e-4)
    assert (after > 0).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("route", ["host", "device"])
def test_float64_beyond_the_square_root_of_its_largest_number(mode: str, route: str) -> None:
    model = small(dtype=torch.float64)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.01)
    table_of(model)[3] = 1e200
    norm = on_device(model, 1.0, mode) if route == "device" else clip_grad_norm_(model, 1.0, mode)
    assert float(norm) == pytest.approx(4e200)
    assert torch.linalg.vector_norm(table_of(model)[3]) > 0.1


@pytest.mark.parametrize("mode", MODES)
def test_a_norm_beyond_float32_comes_back_in_float64(mode: str) -> None:
    model = small()
    for p in model.parameters():
        p.grad = torch.full_like(p, 3e38)
    norm = clip_grad_norm_(model, 1.0, mode)
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(3e38 * math.sqrt(sum(p.numel() for p in model.parameters())), rel=1e-6)
    assert all((g > 0).all() for g in grads(model.parameters()) if g is not None)


def test_float16_whose_norm_alone_overflows() -> None:
    """After unscaling, a norm of 70000 is inf in float16, and torch's clip would zero the step."""
    model = small(dtype=torch.float16)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3000.0)
    table_of(model)[5] = 60000.0
    norm = clip_grad_norm_(model, 1.0)
    assert math.isfinite(float(norm))
    assert all((g > 0).all() for g in grads(model.parameters()) if g is not None)


@given(data=st.data(), mode=st.sampled_from(MODES), dtype=st.sampled_from(DTYPES), max_norm=st.sampled_from((0.1, 1.0)))
@settings(deadline=None, max_examples=80)
def test_both_routes_agree(data: st.DataObject, mode: str, dtype: torch.dtype, max_norm: float) -> None:
    model = small(20, 6, dtype)
    data.draw(st.composite(lambda draw: draw_gradients(model, draw))())
    before = grads(model.parameters())
    host = clip_grad_norm_(model, max_norm, mode)
    wanted = grads(model.parameters())
    put(model.parameters(), before)
    device = on_device(model, max_norm, mode)
    if math.isfinite(float(device)):
        assert float(device) == pytest.approx(float(host), rel=EPS[dtype])
    for a, b in zip(wanted, grads(model.parameters()), strict=True):
        assert a is not None
        assert b is not None
        top = float(a.double().abs().max())
        torch.testing.assert_close(a, b, rtol=5 * EPS[dtype], atol=max(top * 1e-5, 2e-7 if dtype == torch.float16 else 1e-37))
