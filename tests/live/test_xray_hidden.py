"""The loss X-ray where the head is never called: the hidden state is fed instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghoststep.errors import CannotLook
from ghoststep.evidence.loss import LossKind
from ghoststep.instruments.live.calling import live_call
from ghoststep.instruments.live.loss_xray import loss_xray
from ghoststep.subjects.setup import make_setup
from tests.live.test_xray_twin import BATCH, NEXT, assert_as_twin, hard, xray
from tests.live.xray_models import B, D, T, Tiny, V, setup_of


class FusedLogProb(torch.autograd.Function):
    """log p of the labels from hidden states and the head's weight, tile by tile; gradients by hand. No logits in the graph."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, scale: float, cap: float
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.scale, ctx.cap = scale, cap
        out = [FusedLogProb.logits(h, weight, scale, cap)[0].log_softmax(-1) for h in torch.split(hidden, 7)]
        return torch.cat(out).gather(-1, labels[:, None])[:, 0]

    @staticmethod
    def logits(hidden: torch.Tensor, weight: torch.Tensor, scale: float, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
        z = (hidden @ weight.T).float() * scale
        if not cap:
            return z, torch.full_like(z, scale)
        return cap * (z / cap).tanh(), scale * (1 - (z / cap).tanh() ** 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, weight, labels = ctx.saved_tensors
        z, slope = FusedLogProb.logits(hidden, weight, ctx.scale, ctx.cap)
        pull = (functional.one_hot(labels, weight.shape[0]) - z.softmax(-1)) * grad[:, None] * slope
        return (pull.to(hidden.dtype) @ weight), (pull.T @ hidden.float()).to(weight.dtype), None, None, None


def apply(hidden: torch.Tensor, weight: Any, labels: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    found: torch.Tensor = FusedLogProb.apply(hidden, weight, labels, scale, cap)  # type: ignore[no-untyped-call]
    return found


def fused(scale: float = 1.0, cap: float = 0.0) -> Any:
    def loss(model: Tiny, b: dict[str, torch.Tensor]) -> torch.Tensor:
        h = model.hidden(b["input_ids"])[:, :-1].flatten(0, 1)
        labels = NEXT[:, :-1].flatten()
        keep = labels >= 0
        logp = apply(h, model.head_weight(), labels.clamp_min(0), scale, cap)
        return -(logp * keep).sum() / keep.sum()

    return loss


@pytest.mark.parametrize(("scale", "cap"), [(1.0, 0.0), (1 / 16, 0.0), (1.0, 30.0)])
def test_a_fused_loss_that_never_calls_the_head(scale: float, cap: float) -> None:
    found = xray(setup_of(Tiny(), BATCH, fused(scale, cap)))
    assert found.reading == "fed hidden states"
    assert found.num_head_calls == 0
    assert found.kind is LossKind.HARD
    assert_as_twin(found, hard, tolerance=1e-5)
    assert found.residual < 1e-2


def test_fast_takes_the_nearest_head_row() -> None:
    setup = make_setup(setup_of(Tiny(), BATCH, fused()), fast=True)
    found = loss_xray.function(setup, live_call.function(setup))
    assert_as_twin(found, hard)
    assert found.num_forward <= 4


def test_in_bfloat16_weights_are_within_one_percent() -> None:
    found = xray(setup_of(Tiny().to(torch.bfloat16), BATCH, fused()))
    assert_as_twin(found, hard, tolerance=1e-2)


def test_torchs_own_linear_cross_entropy() -> None:
    if not hasattr(functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")

    def loss(model: Tiny, b: dict[str, torch.Tensor]) -> torch.Tensor:
        h = model.hidden(b["input_ids"]).flatten(0, 1)
        result: torch.Tensor = functional.linear_cross_entropy(h, model.head_weight(), NEXT.flatten())
        return result

    assert_as_twin(xray(setup_of(Tiny(), BATCH, loss)), hard)


def test_identical_head_rows_are_ambiguous_or_right_never_wrong() -> None:
    model = Tiny()
    with torch.no_grad():
        model.head_weight()[20:30] = model.head_weight()[20]
    found = xray(setup_of(model, BATCH, fused()))
    sure = ~found.ambiguous_BT & (found.weight_BT != 0)
    assert sure.sum() >= 8
    assert (found.target_BT == NEXT.numpy())[sure].all()


def test_signed_weights() -> None:
    advantage = torch.tensor([1.0, -0.5, 2.0])[:, None]

    def loss(model: Tiny, b: dict[str, torch.Tensor]) -> torch.Tensor:
        h = model.hidden(b["input_ids"])[:, :-1].flatten(0, 1)
        labels = NEXT[:, :-1].flatten()
        logp = apply(h, model.head_weight(), labels.clamp_min(0), 1.0, 0.0)
        keep = (labels >= 0).reshape(B, T - 1)
        return -(logp.reshape(B, T - 1) * advantage * keep).sum() / keep.sum()

    found = xray(setup_of(Tiny(), BATCH, loss))
    assert found.kind is LossKind.POLICY
    count = int((NEXT >= 0).sum())
    expected = torch.where(NEXT >= 0, advantage.expand(B, T) / count, 0.0).double()
    torch.testing.assert_close(torch.from_numpy(found.weight_BT), expected, rtol=1e-5, atol=1e-9)
    assert found.target_BT.tolist() == torch.where(NEXT >= 0, NEXT, -1).tolist()


def test_a_preference_pulls_two_answers_apart_with_equal_weights() -> None:
    def loss(model: Tiny, b: dict[str, torch.Tensor]) -> torch.Tensor:
        h, labels = model.hidden(b["input_ids"])[:, :-1].flatten(0, 1), NEXT[:, :-1].flatten()
        logp = apply(h, model.head_weight(), labels.clamp_min(0), 1.0, 0.0) * (labels >= 0)
        answers = logp.reshape(B, T - 1).sum(1)
        return -functional.logsigmoid(0.1 * (answers[0] - answers[1]))

    found = xray(setup_of(Tiny(), BATCH, loss))
    assert found.kind is LossKind.POLICY
    weights = found.weight_BT[found.weight_BT != 0]
    assert abs(abs(weights) / abs(weights[0]) - 1).max() < 1e-5
    assert (found.target_BT[:2] == torch.where(NEXT >= 0, NEXT, -1)[:2].numpy()).all()


def test_more_positions_than_hidden_dimensions_are_all_read() -> None:
    assert B * T > D
    found = xray(setup_of(Tiny(), BATCH, fused()))
    assert int((found.weight_BT != 0).sum()) == int((NEXT >= 0).sum())


def test_a_patched_forward_that_bypasses_the_head() -> None:
    """As fused heads of trainers do it: the model's forward is replaced and returns log probabilities."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    model = transformers.LlamaForCausalLM(config)

    def forward(input_ids: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
        labels = NEXT[:, :-1]
        logp = apply(hidden.reshape(-1, D), model.lm_head.weight, labels.clamp_min(0).reshape(-1), 1.0, 0.0)
        return {"loss": -(logp.reshape(labels.shape) * (labels >= 0)).sum() / (labels >= 0).sum()}

    model.forward = forward
    assert_as_twin(xray({"model": model, "batch": {"input_ids": BATCH["input_ids"]}}), hard)


def test_a_loss_of_nothing_that_is_seen_is_unknown() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(V, D)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            mean: torch.Tensor = self.embed(input_ids).mean(1)
            return mean

    with pytest.raises(CannotLook):
        xray(setup_of(Alone(), BATCH, lambda m, b: m(b["input_ids"]).detach().sum()))
