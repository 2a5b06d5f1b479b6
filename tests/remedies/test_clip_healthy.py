"""As long as nothing is wrong, the clip is torch's: value, dtype and every bit of every gradient, on both routes."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_ as torchs

from ghoststep import UsageError, clip_grad_norm_
from ghoststep.remedies.clip_events import ClipEvent, listening
from tests.remedies.clip_models import assert_equal_bits, fill, grad_of, grads, on_device, put, small, table_of

torch.set_num_threads(1)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def assert_as_torch(model: nn.Module, max_norm: float, mode: str = "row", **more: bool | None) -> torch.Tensor:
    parameters, heard = list(model.parameters()), list[ClipEvent]()
    before = grads(parameters)
    norm = torchs(parameters, max_norm, **more)  # type: ignore[arg-type]
    wanted = grads(parameters)
    for route in ("model", "list", "generator", "device"):
        put(parameters, before)
        with listening(heard.append):
            if route == "device":
                got = on_device(model, max_norm, mode)
            else:
                what = {"model": model, "list": parameters, "generator": model.parameters()}[route]
                got = clip_grad_norm_(what, max_norm, mode, **more)  # type: ignore[arg-type]
        assert torch.equal(got, norm.to(got.dtype)), route
        assert got.dtype == norm.dtype or (route == "device" and norm.dtype == torch.float16)
        assert_equal_bits(grads(parameters), wanted)
    assert not heard
    return norm


@given(
    dtype=st.sampled_from(DTYPES), rows=st.integers(1, 40), width=st.integers(1, 9), mode=st.sampled_from(("row", "group", "global")),
    share=st.floats(-4, 2.9), max_norm=st.sampled_from((1e-3, 0.1, 1.0, 50.0, math.inf)), seed=st.integers(0, 99),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_bit_identical_down_to_a_coefficient_of_a_thousandth(
    dtype: torch.dtype, rows: int, width: int, mode: str, share: float, max_norm: float, seed: int
) -> None:
    model = small(rows, width, dtype)
    fill(model, 1.0, seed)
    size = math.sqrt(sum(p.numel() for p in model.parameters()))
    target = min(10**share * min(max_norm, 1.0), 3e4)
    for name, _ in model.named_parameters():
        grad_of(model, name).mul_(target / size)
    norm = float(torchs(model.parameters(), math.inf))
    if math.isfinite(norm) and max_norm >= 1.05e-3 * norm:
        assert_as_torch(model, max_norm, mode)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_foreach(foreach: bool | None) -> None:
    model = small()
    fill(model, 1.0)
    before = grads(model.parameters())
    norm = torchs(model.parameters(), 1.0, foreach=foreach)
    wanted = grads(model.parameters())
    put(model.parameters(), before)
    assert torch.equal(clip_grad_norm_(model, 1.0, foreach=foreach), norm)
    assert_equal_bits(grads(model.parameters()), wanted)


@pytest.mark.parametrize("mode", ["row", "group", "global"])
def test_a_sum_reduced_loss_is_hard_but_ordinary(mode: str) -> None:
    """A norm of 1e5 in the whole model: the coefficient is far below 1e-3, and no row stands out."""
    model = small()
    fill(model, 3000.0)
    assert float(assert_as_torch(model, 1.0, mode)) > 1e5


def test_zipf_shaped_row_norms_of_a_sum_reduced_loss_stay_as_torch_has_them() -> None:
    """Row norms over three orders of magnitude, as frequent and rare tokens have, with a trunk of ordinary size."""
    model = small(500)
    fill(model, 1000.0)
    table_of(model).mul_((1000 / torch.arange(1, 501)).clamp_max(100)[:, None])
    assert_as_torch(model, 1.0)


def test_a_huge_finite_trunk_stays_as_torch_has_it_and_is_named() -> None:
    model = small()
    fill(model, 0.01)
    grad_of(model, "1.bias").mul_(1e12)
    before = grads(model.parameters())
    torchs(model.parameters(), 1.0)
    wanted, heard = grads(model.parameters()), list[ClipEvent]()
    put(model.parameters(), before)
    with listening(heard.append):
        clip_grad_norm_(model, 1.0)
    assert_equal_bits(grads(model.parameters()), wanted)
    assert [e.worst_trunk for e in heard] == ["1.bias"]
    assert "clipped as torch does" in heard[0].message
    assert "1.bias" in heard[0].message


@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
def test_other_norms_go_to_torch_also_as_third_positional(norm_type: float) -> None:
    model = small()
    fill(model, 1.0)
    before = grads(model.parameters())
    norm = torchs(model.parameters(), 1.0, norm_type)
    wanted = grads(model.parameters())
    for call in (
        lambda: clip_grad_norm_(model.parameters(), 1.0, norm_type),
        lambda: clip_grad_norm_(model, 1.0, norm_type=norm_type),
    ):
        put(model.parameters(), before)
        got: torch.Tensor = call()  # type: ignore[no-untyped-call]
        assert torch.equal(got, norm)
        assert_equal_bits(grads(model.parameters()), wanted)


def test_the_second_norm_as_third_positional_is_ours() -> None:
    model = small()
    fill(model, 0.01)
    table_of(model)[3] *= 1e27
    assert torch.isfinite(clip_grad_norm_(model.parameters(), 1.0, 2.0))
    assert all((p.grad != 0).any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_bounds_that_lose_every_step_are_refused(max_norm: float) -> None:
    model = small()
    fill(model)
    before = grads(model.parameters())
    with pytest.raises(UsageError, match="max_norm"):
        clip_grad_norm_(model, max_norm)
    assert_equal_bits(grads(model.parameters()), before)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="row, group, global"):
        clip_grad_norm_(small(), 1.0, "rows")


def test_nothing_to_clip() -> None:
    assert float(clip_grad_norm_([], 1.0)) == 0
    assert float(clip_grad_norm_(small(), 1.0)) == 0  # no gradient anywhere
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in list[torch.Tensor]()), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_grad_norm_(small().parameters(), 1.0)  # not empty, only without gradients


def test_one_tensor_and_0_dim_parameters() -> None:
    scalar = nn.Parameter(torch.tensor(3.0))
    scalar.grad = torch.tensor(7.0)
    assert float(clip_grad_norm_(scalar, 1.0)) == 7
    assert float(scalar.grad) == float(torch.tensor(7.0) * (1.0 / (torch.tensor(7.0) + 1e-6)))


def test_convolution_kernels_complex_and_mixed_dtypes() -> None:
    wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    wave.grad = torch.full((3,), 30 + 40j)
    assert torch.equal(clip_grad_norm_([wave], 1.0), torch.linalg.vector_norm(torch.tensor([50.0, 50, 50])))
    model = nn.Sequential(nn.Embedding(9, 4), nn.Conv1d(4, 3, 2), nn.Linear(3, 2).to(torch.bfloat16))
    fill(model, 2.0)
    assert_as_torch(model, 1.0)


def test_parameters_on_meta_go_to_torch() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    assert clip_grad_norm_(model, 1.0).is_meta


def test_a_frozen_table_and_a_model_without_one() -> None:
    model = small()
    fill(model)
    model[0].weight.grad = None
    assert_as_torch(model, 1.0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fill(plain)
    assert_as_torch(plain, 1.0)


def test_gradients_keep_their_tensors() -> None:
    """Whoever holds a gradient (a bucket of DDP, a flat buffer) must see it clipped in place."""
    model = small()
    for scale in (1.0, 1e25):
        fill(model, 1.0)
        table_of(model)[2] *= scale
        held = [p.grad for p in model.parameters()]
        clip_grad_norm_(model, 1.0)
        assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))


@pytest.mark.parametrize("foreach", [None, False])
def test_torch_before_2_6_has_the_two_halves_under_no_name(foreach: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    fill(model, 1.0)
    before = grads(model.parameters())
    norm = torchs(model.parameters(), 1.0, foreach=foreach)
    wanted = grads(model.parameters())
    monkeypatch.delattr(torch.nn.utils, "get_total_norm")
    monkeypatch.delattr(torch.nn.utils, "clip_grads_with_norm_")
    put(model.parameters(), before)
    assert torch.equal(clip_grad_norm_(model, 1.0, foreach=foreach), norm)
    assert_equal_bits(grads(model.parameters()), wanted)
    fill(model, math.inf)
    with pytest.raises(RuntimeError, match="not finite"):
        clip_grad_norm_(model, 1.0, 1.0, error_if_nonfinite=True)
