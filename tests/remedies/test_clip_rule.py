"""Which rows are capped, and what becomes of everything else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as torchs

from ghoststep import clip_grad_norm_
from ghoststep.remedies.clip_events import ClipAction, ClipEvent, listening
from tests.remedies.clip_models import assert_equal_bits, exact_norm, fill, grad_of, grads, on_device, put, small, table_of

torch.set_num_threads(1)
Clip = Callable[..., torch.Tensor]
ROUTES = {
    "model": clip_grad_norm_,
    "list": lambda model, bound, mode="row": clip_grad_norm_(list(model.parameters()), bound, mode),
    "device": on_device,
}


@pytest.fixture(params=ROUTES)
def clip(request: pytest.FixtureRequest) -> Clip:
    found: Clip = ROUTES[request.param]
    return found


def spiked(sizes: dict[int, float], rows: int = 50, scale: float = 0.01) -> nn.Sequential:
    """Ordinary gradients, and rows of the table with the norms asked for."""
    model = small(rows)
    fill(model, scale)
    table = table_of(model)
    for row, norm in sizes.items():
        table[row] *= norm / table[row].norm()
    return model


def norms(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(table_of(model), dim=1, dtype=torch.float64)
    return found


def assert_kept_to_scale(before: torch.Tensor, after: torch.Tensor) -> float:
    """All of it multiplied by one factor, which is returned."""
    factor = float(after.norm() / before.norm())
    torch.testing.assert_close(after, before * factor, rtol=1e-4, atol=1e-9)
    return factor


def test_two_rows_heal_and_healthy_rows_keep_their_gradients(clip: Clip) -> None:
    model = spiked({3: 1e25, 7: 1e10})
    healthy = [i for i in range(50) if i not in (3, 7)]
    table, trunk = table_of(model)[healthy].clone(), grad_of(model, "1.weight").clone()
    norm = clip(model, 1.0)
    assert float(norm) == pytest.approx(1e25, rel=1e-5)
    after = norms(model)
    assert float(after[3]) == pytest.approx(float(after[7]), rel=1e-4)  # both capped, whatever they were
    assert 0.1 < after[3] < 1
    factor = assert_kept_to_scale(table, table_of(model)[healthy])
    assert factor == pytest.approx(assert_kept_to_scale(trunk, grad_of(model, "1.weight")), rel=1e-5)
    assert factor > 0.3
    assert exact_norm(grads(model.parameters())) == pytest.approx(1, rel=1e-3)


def test_group_mode_lets_the_largest_row_eat_the_tables_budget(clip: Clip) -> None:
    """The published cure, for comparison: the trunk is saved, the smaller guilty row and every healthy row are not."""
    model = spiked({3: 1e25, 7: 1e10})
    trunk = grad_of(model, "1.weight").clone()
    clip(model, 1.0, "group")
    after = norms(model)
    assert after[3] == pytest.approx(1, rel=1e-3)
    assert after[7] < 1e-14
    assert after[0] < 1e-24
    assert assert_kept_to_scale(trunk, grad_of(model, "1.weight")) > 0.9


def test_global_mode_only_does_not_overflow(clip: Clip) -> None:
    model = spiked({3: 1e25, 7: 1e10})
    norm = clip(model, 1.0, "global")
    assert float(norm) == pytest.approx(1e25, rel=1e-5)
    assert norms(model)[3] == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("sizes", [
    {3: 1e25, 4: 1e25}, {i: 10.0 ** (5 + i) for i in range(20)}, dict.fromkeys(range(49), 1e25), {0: 1e4, 1: 1e8, 2: 1e16, 3: 1e30},
    {9: 2e3}, {9: 1e37},
])  # fmt: skip
def test_every_guilty_row_is_capped_and_the_rest_lives(clip: Clip, sizes: dict[int, float]) -> None:
    model = spiked(sizes)
    before = norms(model)
    assert math.isfinite(float(clip(model, 1.0)))
    after = norms(model)
    guilty, healthy = sorted(sizes), [i for i in range(50) if i not in sizes]
    assert (after[guilty] / after[guilty].max() > 0.99).all()
    assert (after[healthy] / before[healthy] > 1e-2).all()
    assert after[guilty].min() >= after[healthy].max()


def test_the_finite_spike_engages_only_below_a_thousandth(clip: Clip) -> None:
    for size, engages in ((500.0, False), (2000.0, True)):
        model = spiked({3: size})
        before = grads(model.parameters())
        torchs(model.parameters(), 1.0)
        plain = grads(model.parameters())
        put(model.parameters(), before)
        clip(model, 1.0)
        kept = float(norms(model)[0] / plain[0][0].norm())  # type: ignore[index]
        assert kept == pytest.approx(1) if not engages else kept > 100


def batch(clip: Clip, tokens: list[int], sizes: list[float], mode: str = "row") -> tuple[torch.Tensor, torch.Tensor]:
    """Only the rows of a batch's tokens have a gradient, as in an untied table."""
    model = small()
    fill(model, 0.01)
    table = table_of(model)
    kept = {t: table[t] / table[t].norm() * s for t, s in zip(tokens, sizes, strict=True)}
    table.zero_()
    for t, row in kept.items():
        table[t] = row
    trunk = grad_of(model, "1.weight").clone()
    clip(model, 1.0, mode)
    return norms(model)[tokens], grad_of(model, "1.weight").norm() / trunk.norm()


@pytest.mark.parametrize(("tokens", "sizes"), [
    ([4], [1e25]), ([4, 5], [1e25, 1e25]), ([4, 5], [1e25, 0.05]), ([4, 5, 6], [1e25, 1e12, 0.05]), ([4, 5, 6], [1e20, 1e20, 1e20]),
])  # fmt: skip
def test_batches_of_one_to_three_tokens(clip: Clip, tokens: list[int], sizes: list[float]) -> None:
    after, trunk = batch(clip, tokens, sizes)
    guilty = torch.tensor(sizes) > 1e3
    assert trunk > 0.3
    assert (after[guilty] > 0.1).all()
    if not guilty.all():
        assert (after[~guilty] > 0.015).all()


def test_rows_that_are_all_guilty_alike_still_leave_the_trunk(clip: Clip) -> None:
    model = spiked(dict.fromkeys(range(50), 1e22))
    trunk = grad_of(model, "1.weight").clone()
    clip(model, 1.0)
    assert assert_kept_to_scale(trunk, grad_of(model, "1.weight")) > 0.05
    assert (norms(model) > 0.05).all()


def test_a_table_of_one_row(clip: Clip) -> None:
    """Textual inversion: the only trained row spikes, and nothing else is there."""
    table = nn.Embedding(1, 8)
    table.weight.grad = torch.full((1, 8), 1e25)
    model = nn.Sequential(table)
    assert float(clip(model, 1.0)) == pytest.approx(1e25 * math.sqrt(8), rel=1e-5)
    assert table.weight.grad.norm() == pytest.approx(1, rel=1e-4)


def test_single_element_gradients(clip: Clip) -> None:
    model = nn.Sequential(nn.Embedding(3, 1), nn.Linear(1, 1))
    for p, value in zip(model.parameters(), (0.1, 0.2, 0.3), strict=True):
        p.grad = torch.full_like(p, value)
    table_of(model)[1] = -1e25
    assert float(clip(model, 1.0)) == pytest.approx(1e25)
    assert table_of(model)[1].item() < -0.5
    assert float(grad_of(model, "1.bias")) > 0.15


def test_an_infinite_bound_only_measures(clip: Clip) -> None:
    """`max_grad_norm=0` in one trainer clips to infinity to read the norm; torch then turns inf / inf into NaN everywhere."""
    model = spiked({3: 1e25})
    before = grads(model.parameters())
    assert float(clip(model, math.inf)) == pytest.approx(1e25, rel=1e-5)
    assert_equal_bits(grads(model.parameters()), before)
    torchs(model.parameters(), math.inf)
    assert not torch.isfinite(table_of(model)).any()


def test_an_infinite_norm_of_ordinary_rows_is_clipped_once(clip: Clip) -> None:
    """No row stands out: one clip without overflow, every proportion kept."""
    model = small()
    fill(model, 1e25)
    before = table_of(model).clone()
    clip(model, 1.0)
    assert_kept_to_scale(before.double(), table_of(model).double())
    assert exact_norm(grads(model.parameters())) == pytest.approx(1, rel=1e-4)


def test_a_huge_trunk_is_clipped_and_its_worst_tensor_named() -> None:
    model, heard = spiked({}), list[ClipEvent]()
    grad_of(model, "2.bias").mul_(1e26)
    with listening(heard.append):
        norm = clip_grad_norm_(model, 1.0)
    assert 1e24 < float(norm) < 1e26
    assert heard[0].action is ClipAction.RESCALED
    assert heard[0].worst_trunk == "2.bias"
    assert "2.bias" in heard[0].message
    assert grad_of(model, "2.bias").norm() == pytest.approx(1, rel=1e-4)


def test_spiking_rows_and_a_huge_trunk_together_are_both_told(clip: Clip) -> None:
    model = spiked({3: 1e25})
    grad_of(model, "2.bias").mul_(1e26)
    assert math.isfinite(float(clip(model, 1.0)))
    assert all((g != 0).any() for g in grads(model.parameters()) if g is not None)
