"""Labels 100 %, weights to 1e-5 in float32 and 1 % in fused bfloat16: every loss, on every kind of logits, against the slow twin.

Kinds of logits that the loss is given: through the head's module, through a patched or fused head that is never called. Weights
are compared relative to the largest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from ghoststep.evidence.loss import LossKind, LossXray
from tests.live.test_xray_hidden import fused
from tests.live.test_xray_twin import (
    BATCH,
    KEPT,
    NEXT,
    TRANSFORMS,
    gathered_policy,
    hard,
    mean_of_means,
    of_logits,
    policy,
    position_weighted,
    smoothed,
    soft,
    summed,
    xray,
)
from tests.live.xray_models import B, T, Tiny, V, setup_of, twin

Loss = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def figures(found: LossXray, loss: Loss) -> tuple[float, float]:
    """Share of right labels (also where nothing is trained), and the largest error of a weight over the largest weight."""
    target_BT, weight_BT = twin(loss, (B, T, V))
    right = float((torch.from_numpy(found.target_BT) == target_BT).double().mean())
    error = (torch.from_numpy(found.weight_BT) - weight_BT).abs().max() / weight_BT.abs().max()
    return right, float(error)


def with_z_loss(z: torch.Tensor) -> torch.Tensor:
    return hard(z) + 1e-3 * (z.logsumexp(-1) ** 2 * KEPT.to(z.dtype)).sum() / KEPT.sum()


def reinforce(z: torch.Tensor) -> torch.Tensor:
    """Negative weights on plain log probabilities."""
    logp = z.log_softmax(-1).gather(-1, NEXT.clamp_min(0)[..., None])[..., 0]
    return -(torch.tensor([1.0, -0.5, 2.0], dtype=z.dtype)[:, None] * logp * KEPT.to(z.dtype)).sum() / KEPT.sum()


LOSSES: dict[str, tuple[Loss, Loss]] = {
    "hard": (hard, hard),
    "sum": (summed, summed),
    "smoothed": (smoothed, smoothed),
    "weighted": (position_weighted, position_weighted),
    "mean of means": (mean_of_means, mean_of_means),
    "soft": (soft, soft),
    "z-loss": (with_z_loss, hard),
    "policy ratio": (policy, policy),
    "policy gradient": (reinforce, gathered_policy),
}
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {"as they are": None, **TRANSFORMS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_through_the_head(name: str, kind: str, record_property: Any) -> None:
    loss, expected = LOSSES[name]
    right, error = figures(of_logits(loss, transform=KINDS[kind]), expected)
    record_property("labels", right)
    record_property("weights", error)
    assert right == 1.0
    assert error < 1e-5


@pytest.mark.parametrize(
    ("scale", "cap"), [(1.0, 0.0), (1 / 16, 0.0), (1 / 0.7, 0.0), (1.0, 5.0), (1.0, 30.0), (1 / 16, 30.0), (1 / 0.7, 30.0)]
)
def test_a_head_that_is_never_called(scale: float, cap: float) -> None:
    right, error = figures(xray(setup_of(Tiny(), BATCH, fused(scale, cap))), hard)
    assert right == 1.0
    assert error < 1e-5


def test_a_scale_and_a_tight_cap_at_once_are_not_called_a_plain_cross_entropy() -> None:
    """Where the head is never called, the two cannot be told apart: labels are right, weights off by one common factor."""
    found = xray(setup_of(Tiny(), BATCH, fused(1 / 16, 5.0)))
    target_BT, weight_BT = twin(hard, (B, T, V))
    assert found.kind is LossKind.OTHER
    assert found.target_BT.tolist() == target_BT.tolist()
    ratio = torch.from_numpy(found.weight_BT)[weight_BT != 0] / weight_BT[weight_BT != 0]
    assert float(ratio.max() / ratio.min() - 1) < 1e-5


@pytest.mark.parametrize(("scale", "cap"), [(1.0, 0.0), (1 / 16, 0.0), (1.0, 30.0)])
def test_a_head_that_is_never_called_in_bfloat16(scale: float, cap: float) -> None:
    right, error = figures(xray(setup_of(Tiny().to(torch.bfloat16), BATCH, fused(scale, cap))), hard)
    assert right == 1.0
    assert error < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["hard", "smoothed", "weighted", "policy gradient"])
def test_models_of_low_precision(name: str, dtype: torch.dtype) -> None:
    loss, expected = LOSSES[name]
    model = Tiny().to(dtype)
    right, error = figures(xray(setup_of(model, BATCH, lambda m, b: loss(m(b["input_ids"]).float()))), expected)
    assert right == 1.0
    assert error < 1e-5


def test_a_model_that_is_sure_beyond_0_9999() -> None:
    model = Tiny()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(300):
        optimizer.zero_grad()
        hard(model(BATCH["input_ids"])).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        for p in model.heads.parameters():
            p.mul_(4)
    p_B = model(BATCH["input_ids"]).softmax(-1).gather(-1, NEXT.clamp_min(0)[..., None])[..., 0][NEXT >= 0]
    assert float(p_B.median()) > 0.9999
    for loss in (hard, smoothed, reinforce):
        expected = gathered_policy if loss is reinforce else loss
        right, error = figures(xray(setup_of(model, BATCH, lambda m, b, loss=loss: loss(m(b["input_ids"])))), expected)
        assert right == 1.0
        assert error < 1e-5


@pytest.mark.parametrize("size", [1, 4, 36])
@pytest.mark.parametrize("kept", [False, True])
def test_chunks_of_any_size_and_kept_positions(size: int, kept: bool) -> None:
    def loss(model: Tiny, b: dict[str, torch.Tensor]) -> torch.Tensor:
        rows, labels = model.hidden(b["input_ids"]).flatten(0, 1), NEXT.flatten()
        if kept:
            rows, labels = rows[labels >= 0], labels[labels >= 0]
        total = torch.zeros(())
        for h, y in zip(torch.split(rows, size), torch.split(labels, size), strict=True):
            total = total + functional.cross_entropy(model.logits(h), y, reduction="sum")
        return total / (NEXT >= 0).sum()

    right, error = figures(xray(setup_of(Tiny(), BATCH, loss)), hard)
    assert right == 1.0
    assert error < 1e-5


def test_chunked_linear_cross_entropy() -> None:
    """Tiles of the vocabulary as well: neither logits nor a log-softmax of all classes exist at any time."""

    def loss(model: Tiny, b: dict[str, torch.Tensor]) -> torch.Tensor:
        rows, labels = model.hidden(b["input_ids"]).flatten(0, 1), NEXT.flatten()
        rows, labels = rows[labels >= 0], labels[labels >= 0]
        whole = torch.full((len(rows),), -torch.inf)
        for tile in torch.split(model.head_weight(), 16):
            whole = torch.logaddexp(whole, (rows @ tile.T).logsumexp(-1))
        return (whole - (rows * model.head_weight()[labels]).sum(-1)).mean()

    right, error = figures(xray(setup_of(Tiny(), BATCH, loss)), hard)
    assert right == 1.0
    assert error < 1e-5
