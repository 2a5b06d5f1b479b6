"""What is recorded equals what a slow loop computes beside it, in float64, for random small models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ghoststep.evidence.steps import Step
from tests.watch.loops import steps_of, watch

SHAPES = {"T": (7,), "BT": (3, 5), "BCT": (2, 3, 4)}


class Net(nn.Module):
    """Two tables, one of them with options, and two linear layers. weight: of each place in the loss, so that gradients differ."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(11, 6, **options), nn.Embedding(5, 6)
        self.mix, self.out = nn.Linear(6, 8), nn.Linear(8, 1)
        self.outputs: list[tuple[str, Tensor, Tensor]] = []

    def forward(self, ids: Tensor | None = None, kinds: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        x = inputs_embeds
        if ids is not None:
            assert kinds is not None
            words, types = self.words(ids), self.kinds(kinds)
            for name, given, made in (("words.weight", ids, words), ("kinds.weight", kinds, types)):
                made.retain_grad()
                self.outputs.append((name, given, made))
            x = words + types
        out: Tensor = self.out(torch.tanh(self.mix(x)))
        return out.squeeze(-1)


class Twin:
    """Collects, step by step, what the watch should have seen."""

    def __init__(self, model: Net) -> None:
        self.model = model
        self.steps: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.places: list[tuple[float, str, int, int, int, int, float]] = []

    def backward(self, loss: Tensor, micro: int) -> None:
        rows = {n: p.detach().double().clone() for n, p in self.model.named_parameters()}
        loss.backward()  # type: ignore[no-untyped-call]
        self.losses.append(float(loss.detach()))
        for name, ids, output in self.model.outputs:
            assert output.grad is not None
            gradient = output.grad.double().reshape(-1, output.shape[-1])
            width = ids.shape[-1]
            for place, token in enumerate(ids.reshape(-1).tolist()):
                norm = float(torch.linalg.vector_norm(gradient[place]))
                row = float(torch.linalg.vector_norm(rows[name][token]))
                self.places.append((norm, name, token, micro, place // width, place % width, row))
        self.model.outputs.clear()

    def norms(self) -> dict[str, float]:
        dense = {n: p.grad.to_dense().double() for n, p in self.model.named_parameters() if p.grad is not None}
        return {n: float(torch.linalg.vector_norm(g)) for n, g in dense.items()}

    def step(self, before: dict[str, float], weights: Tensor) -> None:
        now = flat(self.model)
        self.steps.append(
            {
                "before": before,
                "after": self.norms(),
                "loss": sum(self.losses),
                "places": sorted(self.places, key=lambda p: -p[0])[:4],
                "num_tokens": len(self.places),
                "moved": float((now - weights).norm() / weights.norm()),
                "rows": {n: p.detach().double().norm(dim=1) for n, p in self.model.named_parameters() if p.ndim == 2},
            }
        )
        self.losses, self.places = [], []


def flat(model: nn.Module) -> Tensor:
    """The first 64 elements of every parameter that trains."""
    return torch.cat([p.detach().double().reshape(-1)[:64] for p in model.parameters() if p.requires_grad])


def total(norms: dict[str, float], names: Any = None) -> float:
    return math.sqrt(sum(v * v for n, v in norms.items() if names is None or n in names))


def train(
    model: Net, twin: Twin, *, shape: tuple[int, ...], micro: int, clip: float, factor: float, num_steps: int = 7
) -> None:
    random = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer, flush_steps=3, detail="full") as w:
        for _ in range(num_steps):
            optimizer.zero_grad()
            for number in range(micro):
                ids = torch.randint(0, 11, shape, generator=random)
                kinds = torch.randint(0, 5, shape, generator=random)
                weight = torch.rand(shape, generator=random) * factor
                twin.backward((model(ids, kinds=kinds) * weight).sum(), number)
                if number == 0:  # after the forward, which shortens the table rows that it uses under max_norm
                    weights = flat(model)
            before = twin.norms()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            twin.step(before, weights)
    assert not w.faults.lines()
    names = list(w.flusher.facts.trainable)
    for step, expected in zip(steps_of(w), twin.steps, strict=True):
        compare(step, expected, names)


def compare(step: Step, expected: dict[str, Any], names: list[str], rel: float = 1e-5) -> None:
    before, after = expected["before"], expected["after"]
    tables = {"words.weight", "kinds.weight"}
    norms = dict(zip(names, np.frombuffer(step.norms, dtype="<f4").tolist(), strict=True))
    assert norms == pytest.approx({n: before.get(n, -1.0) for n in names}, rel=rel)
    assert step.norm == pytest.approx(total(before), rel=rel)
    assert step.tables_norm == pytest.approx(total(before, tables), rel=rel)
    assert step.trunk_norm == pytest.approx(total(before, set(names) - tables), rel=rel)
    assert step.norm_after == pytest.approx(total(after), rel=rel)
    assert step.trunk_norm_after == pytest.approx(total(after, set(names) - tables), rel=rel)
    assert step.loss == pytest.approx(expected["loss"], rel=rel)
    assert step.num_tokens == expected["num_tokens"]
    assert step.num_gradients == len(before)
    assert step.num_zero_before == sum(v == 0 for v in before.values())
    assert step.num_nonfinite_before == 0
    assert step.moved == pytest.approx(expected["moved"], rel=1e-3, abs=1e-7)
    assert [r.gradient_norm for r in step.rows] == pytest.approx([p[0] for p in expected["places"]], rel=rel)
    candidates = {p[1:6]: p for p in expected["places"]}
    norms_of_places = [p[0] for p in expected["places"]]
    for row in step.rows:
        key = (row.table, row.token_id, row.micro_batch, row.example, row.position)
        if key not in candidates:  # only where two places are the same to the last digits
            assert min(abs(row.gradient_norm - n) for n in norms_of_places) <= 1e-5 * row.gradient_norm
            continue
        assert row.row_norm_before == pytest.approx(candidates[key][6], rel=rel)
        assert row.row_norm_after == pytest.approx(float(expected["rows"][row.table][row.token_id]), rel=rel)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from(sorted(SHAPES)),
    micro=st.integers(1, 3),
    clip=st.sampled_from([0.0, 0.1, 100.0]),
    factor=st.sampled_from([1.0, 1e-3, 1e6]),
    option=st.sampled_from(["", "padding_idx", "scale_grad_by_freq", "max_norm", "sparse"]),
)
def test_random_models(seed: int, shape: str, micro: int, clip: float, factor: float, option: str) -> None:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"padding_idx": {"padding_idx": 2}, "max_norm": {"max_norm": 1.0}}.get(option, {option: True})  # type: ignore[assignment]
    model = Net(**(options if option else {}))
    # Largest by element, as the watch ranks places, is largest by norm only where a place's gradient has one direction.
    with torch.no_grad():
        model.mix.weight.copy_(torch.outer(torch.rand(8) - 0.5, torch.ones(6)))
    model.mix.weight.requires_grad_(False)
    train(model, Twin(model), shape=SHAPES[shape], micro=micro, clip=0.0 if option == "sparse" else clip, factor=factor)


@pytest.mark.parametrize("micro", [1, 2])
def test_a_finite_gradient_that_overflows(micro: int) -> None:
    """1e28: the norm is inf as torch has it, the place is finite, nothing counts as non-finite, and the clip leaves zeros."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids, kinds = torch.arange(10).reshape(2, 5), torch.zeros((2, 5), dtype=torch.long)
    with watch(model, optimizer) as w:
        for _ in range(3):
            optimizer.zero_grad()
            for number in range(micro):
                spike = 1e28 * model.words(torch.tensor([[7]])).sum() if number == micro - 1 else 0.0
                (model(ids, kinds).sum() + spike).backward()
                model.outputs.clear()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    for step in steps_of(w):
        assert step.norm == step.tables_norm == math.inf
        assert step.trunk_norm is not None
        assert math.isfinite(step.trunk_norm)
        assert step.num_nonfinite_before == 0
        assert step.nonfinite_before == ()
        assert step.num_zero_after == step.num_gradients == 6
        first = step.rows[0]
        assert (first.table, first.token_id, first.micro_batch, first.position) == ("words.weight", 7, micro - 1, 0)
        assert first.gradient_norm == pytest.approx(1e28 * math.sqrt(6), rel=1e-5)
        assert first.row_norm_before == pytest.approx(float(model.words.weight[7].detach().double().norm()), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_not_finite(value: float, clip: float) -> None:
    """In the trunk, for real: named, with and without a clip (which turns inf into NaN, and the rest into zeros)."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.mix.bias.register_hook(lambda g: torch.full_like(g, value))  # type: ignore[no-untyped-call]
    with watch(model, optimizer) as w:
        model(torch.arange(10).reshape(2, 5), torch.zeros((2, 5), dtype=torch.long)).sum().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    (step,) = steps_of(w)
    assert step.num_nonfinite_before == 1
    assert step.nonfinite_before == ("mix.bias",)
    assert step.norm is not None
    assert math.isnan(step.norm) if math.isnan(value) else step.norm == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_place_that_is_not_finite(value: float) -> None:
    """The gradient at one place of the batch: that place comes first."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, optimizer) as w:
        optimizer.zero_grad()
        out = model(torch.arange(10).reshape(2, 5), torch.zeros((2, 5), dtype=torch.long))
        (out * torch.tensor([[1.0] * 5, [1.0, 1.0, value, 1.0, 1.0]])).sum().backward()
        optimizer.step()
    (step,) = steps_of(w)
    places = {(r.table, r.example, r.position) for r in step.rows if not math.isfinite(r.gradient_norm)}
    assert places == {("words.weight", 1, 2), ("kinds.weight", 1, 2)}
    assert all(not math.isfinite(r.gradient_norm) for r in step.rows[:2])
    assert {"words.weight", "kinds.weight"} <= set(step.nonfinite_before)


def test_given_embeddings_are_unseen() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as w:
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs_embeds=torch.randn(2, 5, 6)).sum().backward()
            optimizer.step()
    for step in steps_of(w):
        assert (step.num_tokens, step.rows, step.tables_norm) == (0, (), None)
        assert step.num_gradients == 4
        assert step.trunk_norm == step.norm
