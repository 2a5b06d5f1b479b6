"""Influence changes nothing, sees a planted leak just above its floor, and costs what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from ghoststep.engine import Case
from ghoststep.evidence.influence import Influence, Region
from ghoststep.finding import Outcome, Severity
from ghoststep.instruments.live.base_probe import BaseProbe
from ghoststep.subjects.setup import make_setup
from ghoststep.visibility import GRADIENT_WARNING_RATIO, SWAP_WARNING_RATIO
from tests.live import influence_faults as faults
from tests.live.influence_models import PAD, TinyLM, V, bad, lm_batch, registry, right, seeded, verdicts


def measure(model: nn.Module, batch: dict[str, torch.Tensor], *, fast: bool = False, **more: Any) -> Influence:
    setup = make_setup({"model": model, "batch": batch, "pad_token_id": PAD, **more}, fast=fast)
    found = Case([setup], registry().instruments).fact(Influence)
    assert isinstance(found, Influence), found
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> float:
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: TinyLM(dropout=0.3),
    "zero-initialised": lambda: TinyLM(zero=True),
    "batch norm": lambda: TinyLM(mix=faults.BatchNorm()),
    "routing": lambda: TinyLM(mix=faults.Capacity(last_first=True, per_example=False)),
    "recurrent": faults.Recurrent,
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_observing_changes_nothing_and_the_next_step_is_the_same(name: str, train: bool) -> None:
    def run(*, look: bool) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
        model = seeded(MODELS[name], train=train)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        torch.manual_seed(7)
        losses = [step(model, optimizer, lm_batch())]
        grads = [p.grad for p in model.parameters()]
        if look:
            before = {k: v.clone() for k, v in model.state_dict().items()}
            random = torch.get_rng_state()
            verdicts(model, lm_batch(), optimizer=optimizer)
            assert torch.equal(random, torch.get_rng_state())
            assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
            assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
            assert all(p.requires_grad for p in model.parameters())
            assert all(m.training is train for m in model.modules())
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        losses.append(step(model, optimizer, lm_batch()))
        return losses, model.state_dict(), torch.get_rng_state()

    looked, bare = run(look=True), run(look=False)
    assert looked[0] == bare[0]
    assert all(torch.equal(v, bare[1][k]) for k, v in looked[1].items())
    assert torch.equal(looked[2], bare[2])


class TestPower:
    """A leak of a chosen strength is planted between the layers."""

    @pytest.mark.parametrize("strength", [3e-3, 1e-4])
    def test_a_leak_above_the_swap_floor_is_seen_by_swap(self, strength: float) -> None:
        reading = measure(seeded(lambda: TinyLM(mix=faults.Shift(strength))), lm_batch()).readings[Region.FUTURE]
        assert reading.relative > SWAP_WARNING_RATIO
        assert reading.num_above > 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_leak_above_the_gradient_floor_is_seen_by_gradient(self, dtype: torch.dtype) -> None:
        found = measure(seeded(lambda: TinyLM(faults.soft(-15.0)).to(dtype)), lm_batch())
        assert found.trained_future_gradient is not None
        assert GRADIENT_WARNING_RATIO < found.trained_future_gradient.relative < 1e-3

    def test_a_weight_of_1e_26_has_a_gradient_where_a_swap_is_blind(self) -> None:
        found = measure(seeded(lambda: TinyLM(faults.soft(-60.0), eager=True)), lm_batch())
        assert found.readings[Region.FUTURE].relative == 0.0
        assert 0.0 < found.gradient_readings[Region.FUTURE].relative < 1e-20

    def test_the_relative_influence_follows_the_planted_strength(self) -> None:
        weak = measure(seeded(lambda: TinyLM(mix=faults.Shift(1e-4))), lm_batch()).gradient_readings[Region.FUTURE]
        strong = measure(seeded(lambda: TinyLM(mix=faults.Shift(1e-2))), lm_batch()).gradient_readings[Region.FUTURE]
        assert strong.relative / weak.relative == pytest.approx(100, rel=0.2)

    def test_without_any_mixing_nothing_is_clear(self) -> None:
        class Silent(TinyLM):
            def forward(self, *args: Any, **more: Any) -> Any:
                self.scale = 0.0
                return super().forward(*args, **more)

        found = verdicts(seeded(lambda: Silent(faults.no_causal)), lm_batch())
        assert found["GS101"].outcome is Outcome.UNKNOWN
        assert "proves nothing" in (found["GS101"].reason or "")


def test_against_a_slow_twin() -> None:
    """Every single token replaced, one at a time: where it says nothing moves, nothing is told, and the other way round."""
    model, batch = seeded(lambda: TinyLM(faults.one_leaky_pair)), lm_batch()
    found = measure(model, batch)
    with torch.no_grad():
        base = model(**batch).logits
        moved = torch.zeros(16, 16, dtype=torch.bool)
        for s in range(16):
            ids = batch["input_ids"].clone()
            ids[0, s] = 3 + (ids[0, s] + 5) % (V - 3)
            moved[s] = (model(**{**batch, "input_ids": ids}).logits - base)[0].abs().amax(-1) > 0
    assert found.matrix_example == 0
    looked = ~np.isnan(found.matrix_ST)
    assert looked.sum() > 40
    future = np.triu(np.ones((16, 16), dtype=bool), 1).T
    assert not (found.matrix_ST > 0)[looked & future & ~moved.numpy()].any()
    assert moved[8, 7]
    assert found.trained_future is not None
    assert found.trained_future.target[1] == 7


class TestCost:
    def test_full_and_fast(self) -> None:
        full = measure(seeded(TinyLM), lm_batch())
        # In steps of one forward and a backward of two: 8/3 + 2/3 (no gradient of parameters), less the head and the loss.
        assert (full.num_forward, full.num_backward) == (8, 2)
        fast = measure(seeded(TinyLM), lm_batch(), fast=True)
        assert (fast.num_forward, fast.num_backward) == (3, 1)

    def test_the_head_is_not_run_in_later_passes(self) -> None:
        model = seeded(TinyLM)
        assert isinstance(model, TinyLM)
        calls: list[int] = []

        class Counting(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                calls.append(1)
                return super().forward(x)

        model.head.__class__ = Counting
        found = measure(model, lm_batch())
        assert found.num_forward > 6
        before = len(calls)
        base = Case([make_setup({"model": model, "batch": lm_batch()})], registry().instruments).fact(BaseProbe)
        assert isinstance(base, BaseProbe)
        assert len(calls) == before + 1  # the run that finds the head; the survey stops before it
        base.probe.hidden()
        base.probe.gradient([(0, 3)])
        assert len(calls) == before + 1


class Wrapped(nn.Module):
    def __init__(self, lm: nn.Module, how: str) -> None:
        super().__init__()
        self.lm, self.how = lm, how

    def forward(self, ids: torch.Tensor, keep: torch.Tensor) -> Any:
        logits = self.lm(ids, keep).logits
        return {"tensor": logits, "tuple": (logits,), "dict": {"out": logits}}[self.how]


@pytest.mark.parametrize("how", ["tensor", "tuple", "dict", "compiled"])
@pytest.mark.parametrize("leaks", [True, False])
def test_outputs_of_every_shape(how: str, leaks: bool) -> None:
    lm = seeded(lambda: TinyLM(faults.no_causal if leaks else right))
    model: Any = Wrapped(lm, "tensor" if how == "compiled" else how)
    if how == "compiled":
        model = torch.compile(model, backend="eager")
        model(lm_batch()["input_ids"], lm_batch()["attention_mask"])

    def loss_fn(m: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out = m(batch["input_ids"], batch["attention_mask"])
        logits = out if isinstance(out, torch.Tensor) else out["out"] if isinstance(out, dict) else out[0]
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    found = verdicts(model, lm_batch(), loss_fn=loss_fn)
    assert bad(found) == ({"GS101"} if leaks else set())
    assert found["GS101"].severity is Severity.ERROR
