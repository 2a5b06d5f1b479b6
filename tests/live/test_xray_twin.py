"""The loss X-ray against its slow twin: labels all right, weights to 1e-5 in float32, whatever the loss does with the logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from ghoststep.evidence.loss import LossKind, LossXray
from ghoststep.instruments.live.calling import live_call
from ghoststep.instruments.live.loss_xray import loss_xray
from ghoststep.subjects.setup import make_setup
from tests.live.xray_models import B, T, Tiny, V, batch, next_labels, setup_of, twin

Loss = Callable[[torch.Tensor], torch.Tensor]
BATCH = batch()
NEXT = next_labels(BATCH)
SAFE = NEXT.clamp_min(0)
KEPT = (NEXT >= 0).double()


def xray(given: dict[str, Any]) -> LossXray:
    setup = make_setup(given)
    found = loss_xray.function(setup, live_call.function(setup))
    assert isinstance(found, LossXray)
    return found


def of_logits(loss: Loss, **model: Any) -> LossXray:
    """The X-ray of a loss of final logits [B, T, V], through a model's head."""
    return xray(setup_of(Tiny(**model), BATCH, lambda m, b: loss(m(b["input_ids"]))))


def assert_as_twin(found: LossXray, loss: Loss, *, tolerance: float = 1e-5) -> None:
    target, weight = twin(loss, (B, T, V))
    assert found.target_BT.tolist() == target.tolist()
    torch.testing.assert_close(torch.from_numpy(found.weight_BT), weight, rtol=tolerance, atol=1e-12)
    assert not found.ambiguous_BT.any()


def hard(z: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(z.flatten(0, 1), NEXT.flatten())


def class_second(z: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(z.transpose(1, 2), NEXT)


def summed(z: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(z.flatten(0, 1), NEXT.flatten(), reduction="sum")


def smoothed(z: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(z.flatten(0, 1), NEXT.flatten(), label_smoothing=0.1)


def position_weighted(z: torch.Tensor) -> torch.Tensor:
    losses = functional.cross_entropy(z.flatten(0, 1), NEXT.flatten(), reduction="none")
    return (losses * torch.linspace(0.2, 3, B * T, dtype=z.dtype)).mean()


def mean_of_means(z: torch.Tensor) -> torch.Tensor:
    losses = functional.cross_entropy(z.flatten(0, 1), NEXT.flatten(), reduction="none").reshape(B, T)
    return (losses.sum(1) / (NEXT >= 0).sum(1)).mean()


def soft(z: torch.Tensor) -> torch.Tensor:
    teacher = torch.randn(B, T, V, generator=torch.Generator().manual_seed(9), dtype=torch.float64).mul(3).softmax(-1)
    return (
        functional.kl_div(z.log_softmax(-1), teacher.to(z.dtype), reduction="none").sum(-1) * KEPT.to(z.dtype)
    ).sum() / KEPT.sum()


def gathered(z: torch.Tensor) -> torch.Tensor:
    """No log-softmax in the graph."""
    chosen = z.gather(-1, SAFE[..., None])[..., 0] - z.logsumexp(-1)
    return -(chosen * KEPT.to(z.dtype)).sum() / KEPT.sum()


def policy(z: torch.Tensor) -> torch.Tensor:
    advantage = torch.tensor([1.0, -0.5, 2.0], dtype=z.dtype)[:, None]
    logp = z.log_softmax(-1).gather(-1, SAFE[..., None])[..., 0]
    return -(advantage * (logp - logp.detach()).exp() * KEPT.to(z.dtype)).sum() / KEPT.sum()


def gathered_policy(z: torch.Tensor) -> torch.Tensor:
    advantage = torch.tensor([1.0, -0.5, 2.0], dtype=z.dtype)[:, None]
    logp = z.gather(-1, SAFE[..., None])[..., 0] - z.logsumexp(-1)
    return -(advantage * logp * KEPT.to(z.dtype)).sum() / KEPT.sum()


PLAIN: dict[str, tuple[Loss, LossKind]] = {
    "hard": (hard, LossKind.HARD),
    "class dimension second": (class_second, LossKind.HARD),
    "sum": (summed, LossKind.HARD),
    "smoothed": (smoothed, LossKind.SMOOTHED),
    "weighted": (position_weighted, LossKind.WEIGHTED),
    "mean of means": (mean_of_means, LossKind.WEIGHTED),
    "soft": (soft, LossKind.SOFT),
    "gather and logsumexp": (gathered, LossKind.HARD),
    "policy gradient": (policy, LossKind.POLICY),
    "policy gradient by gather": (gathered_policy, LossKind.POLICY),
}


@pytest.mark.parametrize("name", PLAIN)
def test_labels_and_weights(name: str) -> None:
    loss, kind = PLAIN[name]
    found = of_logits(loss)
    assert_as_twin(found, loss)
    assert found.kind is kind
    assert found.residual < 1e-5 or kind is LossKind.POLICY


TRANSFORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "soft cap 5": lambda z: 5 * (z / 5).tanh(),
    "soft cap 30": lambda z: 30 * (z / 30).tanh(),
    "logit scale 1/16": lambda z: z / 16,
    "temperature 0.7": lambda z: z / 0.7,
    "multiplied by 1000: p_y > 0.9999 or < 1e-4": lambda z: z * 1000,
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("loss", [hard, smoothed, policy], ids=lambda f: f.__name__)
def test_transformed_logits(name: str, loss: Loss) -> None:
    assert_as_twin(of_logits(loss, transform=TRANSFORMS[name]), loss)


@pytest.mark.parametrize("name", ["logit scale 1/16", "temperature 0.7"])
def test_scaled_logits_without_a_log_softmax(name: str) -> None:
    found = of_logits(gathered, transform=TRANSFORMS[name])
    assert_as_twin(found, gathered)
    assert found.reading == "fed logits"


def test_a_confident_model_hides_nothing() -> None:
    model = Tiny()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(150):
        optimizer.zero_grad()
        hard(model(BATCH["input_ids"])).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    p = model(BATCH["input_ids"]).softmax(-1).gather(-1, SAFE[..., None])[..., 0][NEXT >= 0]
    assert float(p.median()) > 0.99
    assert_as_twin(xray(setup_of(model, BATCH, lambda m, b: hard(m(b["input_ids"])))), hard)


def test_z_loss_beside_the_cross_entropy_changes_neither() -> None:
    def loss(z: torch.Tensor) -> torch.Tensor:
        return hard(z) + 1e-3 * (z.logsumexp(-1) ** 2 * KEPT.to(z.dtype)).sum() / KEPT.sum()

    found = of_logits(loss)
    assert_as_twin(found, hard)
    assert found.kind is LossKind.HARD


def test_direct_preference_optimisation_pushes_the_rejected_answer_down() -> None:
    def loss(z: torch.Tensor) -> torch.Tensor:
        logp = (z.log_softmax(-1).gather(-1, SAFE[..., None])[..., 0] * KEPT.to(z.dtype)).sum(1)
        return -functional.logsigmoid(0.1 * (logp[0] - logp[1]))

    found = of_logits(loss)
    assert found.kind is LossKind.POLICY
    signs = found.weight_BT.sum(1)
    assert signs[0] > 0 > signs[1]
    assert signs[2] == 0
    assert found.target_BT[:2].tolist() == torch.where(NEXT >= 0, NEXT, -1)[:2].tolist()
    half = 0.1 / (1 + math.exp(0.1 * math.log(V) * -(float(KEPT[0].sum() - KEPT[1].sum()))))
    assert found.weight_BT[0, 0] == pytest.approx(half, rel=1e-5)


def test_what_is_no_cross_entropy_is_called_so() -> None:
    def unlikelihood(z: torch.Tensor) -> torch.Tensor:
        p = z.softmax(-1).gather(-1, SAFE[..., None])[..., 0]
        return -((1 - p).log() * KEPT.to(z.dtype)).sum() / KEPT.sum()

    def focal(z: torch.Tensor) -> torch.Tensor:
        logp = z.log_softmax(-1).gather(-1, SAFE[..., None])[..., 0]
        return -((1 - logp.exp()) ** 2 * logp * KEPT.to(z.dtype)).sum() / KEPT.sum()

    def by_own_probability(z: torch.Tensor) -> torch.Tensor:
        logp = z.log_softmax(-1).gather(-1, SAFE[..., None])[..., 0]
        return -(logp.exp().detach() * logp * KEPT.to(z.dtype)).sum() / KEPT.sum()

    assert of_logits(unlikelihood).kind in (LossKind.OTHER, LossKind.POLICY)
    for loss in (focal, by_own_probability):
        found = of_logits(loss)
        assert found.kind is LossKind.OTHER
        assert found.residual > 0.05


def test_chunked_calls_of_the_head_are_put_in_their_places() -> None:
    def loss(model: Tiny, b: dict[str, torch.Tensor]) -> torch.Tensor:
        rows, labels = model.hidden(b["input_ids"])[:, :-1].flatten(0, 1), NEXT[:, :-1].flatten()
        total = torch.zeros(())
        for h, y in zip(torch.split(rows, 5), torch.split(labels, 5), strict=True):
            total = total + functional.cross_entropy(model.logits(h), y, reduction="sum")
        return total / (NEXT >= 0).sum()

    found = xray(setup_of(Tiny(), BATCH, loss))
    assert_as_twin(found, hard)
    assert found.num_head_calls == 7
    assert not found.further


def test_kept_positions_only() -> None:
    def loss(model: Tiny, b: dict[str, torch.Tensor]) -> torch.Tensor:
        kept = NEXT >= 0
        return functional.cross_entropy(model.logits(model.hidden(b["input_ids"])[kept]), NEXT[kept])

    assert_as_twin(xray(setup_of(Tiny(), BATCH, loss)), hard)


def test_flattened_and_time_first_logits() -> None:
    def flat(model: Tiny, b: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model.logits(model.hidden(b["input_ids"]).flatten(0, 1)), NEXT.flatten())

    def time_first(model: Tiny, b: dict[str, torch.Tensor]) -> torch.Tensor:
        z = model.logits(model.hidden(b["input_ids"]).transpose(0, 1))
        return functional.cross_entropy(z.flatten(0, 1), NEXT.T.flatten())

    assert_as_twin(xray(setup_of(Tiny(), BATCH, flat)), hard)
    assert_as_twin(xray(setup_of(Tiny(), BATCH, time_first)), hard)


def test_two_heads_are_two_targets() -> None:
    second = torch.cat([NEXT[:, 1:], torch.full((B, 1), -100)], dim=1)

    def loss(model: Tiny, b: dict[str, torch.Tensor]) -> torch.Tensor:
        h = model.hidden(b["input_ids"])
        ahead = functional.cross_entropy(model.logits(h, 1).flatten(0, 1), second.flatten())
        return hard(model.logits(h, 0)) + 0.3 * ahead

    found = xray(setup_of(Tiny(num_heads=2), BATCH, loss))
    assert_as_twin(found, hard)
    assert len(found.further) == 1
    assert found.further[0].target_BT.tolist() == torch.where(second >= 0, second, -1).tolist()
    assert found.further[0].weight_BT[0, 0] == pytest.approx(0.3 / int((second >= 0).sum()), rel=1e-5)


def test_a_head_without_a_module() -> None:
    found = xray(setup_of(Tiny(tied=True), BATCH, lambda m, b: hard(m(b["input_ids"]))))
    assert_as_twin(found, hard)
    assert "hidden" in found.reading


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models(dtype: torch.dtype) -> None:
    model = Tiny().to(dtype)
    assert_as_twin(xray(setup_of(model, BATCH, lambda m, b: hard(m(b["input_ids"]).float()))), hard)
    assert_as_twin(xray(setup_of(model, BATCH, lambda m, b: hard(m(b["input_ids"])))), hard)


def test_nothing_carries_loss() -> None:
    ignored = {**BATCH, "labels": torch.full_like(BATCH["labels"], -100)}
    found = xray(
        setup_of(Tiny(), ignored, lambda m, b: functional.cross_entropy(m(b["input_ids"]).flatten(0, 1), b["labels"].flatten()))
    )
    assert found.kind is LossKind.NOTHING
    assert math.isnan(found.loss)
    constant = xray(setup_of(Tiny(), ignored, lambda m, b: m(b["input_ids"]).detach().sum() * 0))
    assert constant.kind is LossKind.NOTHING


def test_masked_classes_and_smoothing_on_them() -> None:
    def masked(z: torch.Tensor) -> torch.Tensor:
        return z.masked_fill(torch.arange(V) >= V - 4, -torch.inf)

    inside = NEXT.clamp_max(V - 5).flatten()
    clean = of_logits(lambda z: functional.cross_entropy(masked(z).flatten(0, 1), inside))
    assert (clean.masked_classes, clean.first_masked_class, clean.smoothing_on_masked) == (4, V - 4, 0)
    found = of_logits(lambda z: functional.cross_entropy(masked(z).flatten(0, 1), inside, label_smoothing=0.1))
    assert math.isinf(found.loss)
    assert found.smoothing_on_masked == pytest.approx(0.1 * 4 / V, rel=1e-4)
    cut = of_logits(lambda z: functional.cross_entropy(z[..., : V - 4].flatten(0, 1), inside, label_smoothing=0.1))
    assert cut.masked_classes == 4
    assert cut.smoothing_on_masked == 0
