"""Influence against its definition: one token changed at a time, on models with random masks; and planted effects near the floor.

S sources, T targets; reach_ST is True where the token at s can reach the hidden state at t through the layers' masks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from ghoststep.engine import Case, ask
from ghoststep.evidence.influence import Influence
from ghoststep.finding import Outcome, Verdict
from ghoststep.instruments.live.base_probe import BaseProbe
from ghoststep.subjects.setup import make_setup
from ghoststep.visibility import GRADIENT_WARNING_RATIO, SWAP_WARNING_RATIO
from tests.live.influence_models import Attention, Output, registry

V, D, T = 60, 32, 10
NUM_MODELS = int(os.environ.get("GHOSTSTEP_PLANS", "25"))
QUICK = settings(
    max_examples=NUM_MODELS, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip


class Masked(nn.Module):
    """Attention layers with a mask each, [T, T] with True = query (first) sees key (second), and a leak of `strength` from the
    next position's hidden state before the head's norm."""

    def __init__(self, masks: list[torch.Tensor], *, eager: bool = False, strength: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.layers = nn.ModuleList(Attention(eager=eager, zero=False, dropout=0.0) for _ in masks)
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(D, 48), nn.GELU(), nn.Linear(48, D)) for _ in masks)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        self.masks, self.strength = masks, strength

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        x = self.embed(input_ids) + self.pos.weight[: input_ids.shape[1]]
        for layer, mlp, mask in zip(self.layers, self.mlps, self.masks, strict=True):
            x = x + layer(x, mask[None, None])
            x = x + mlp(x)
        if self.strength:
            x = x + self.strength * functional.pad(x, (0, 0, 0, 1))[:, 1:]
        logits = self.head(self.norm(x))
        loss = None if labels is None else functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(logits=logits, loss=loss)


def reached(masks: list[torch.Tensor]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """reach_ST by boolean products of the layers' masks; the residual stream lets each position see itself."""
    reach = np.eye(T, dtype=bool)
    for mask in masks:
        seen = mask.numpy() | np.eye(T, dtype=bool)
        reach = (seen.astype(int) @ reach.astype(int)) > 0
    return reach.T


def slow_twin(model: nn.Module, ids: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The definition, in float64, one forward a source: change of each hidden state at the head's input, example 0, [S, T]."""
    exact: Any = copy.deepcopy(model).double().eval()
    caught: list[torch.Tensor] = []
    handle = exact.head.register_forward_pre_hook(lambda m, a: caught.append(a[0][0].detach()))
    with torch.no_grad():
        exact(ids[:1])
        for s in range(T):
            other = ids[:1].clone()
            other[0, s] = 3 + (other[0, s] + 17) % (V - 3)
            exact(other)
    handle.remove()
    base, *changed = caught
    return torch.stack([(c - base).norm(dim=-1) for c in changed]).numpy() / float(base.norm(dim=-1).median())


def tokens() -> torch.Tensor:
    return torch.randint(3, V, (3, T), generator=torch.Generator().manual_seed(5))


def look(model: nn.Module) -> tuple[Case, Verdict]:
    ids = tokens()
    case = Case([make_setup({"model": model, "batch": {"input_ids": ids, "labels": ids}})], registry().instruments)
    check = next(c for c in registry().checks if c.code == "GS101")
    return case, ask(case, check)


@st.composite
def masks(draw: st.DrawFn) -> list[torch.Tensor]:
    """One to three layers: a random part of the past, now and then a pair of the future."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        density = draw(st.sampled_from([0.3, 0.6, 1.0]))
        mask = (torch.rand(T, T, generator=g) < density).tril() | torch.eye(T).bool()
        for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
            t = draw(st.integers(0, T - 2))
            mask[t, draw(st.integers(t + 1, T - 1))] = True
        found.append(mask)
    return found


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@QUICK
@given(drawn=masks(), eager=st.booleans(), train=st.booleans())
def test_who_sees_whom_is_the_closure_of_the_masks(drawn: list[torch.Tensor], eager: bool, train: bool) -> None:
    model = Masked(drawn, eager=eager).train(train)
    reach_ST = reached(drawn)
    twin_ST = slow_twin(model, tokens())
    assert ((twin_ST > 0) == reach_ST).all()  # the twin is right

    case, verdict = look(model)
    base, found = case.fact(BaseProbe), case.fact(Influence)
    assert isinstance(base, BaseProbe)
    assert isinstance(found, Influence)
    for t in range(T):  # by gradient, each pair exactly
        seen_S = base.probe.gradient([(0, t)])[0].numpy() > 0
        assert (seen_S == reach_ST[:, t]).all(), t
    for s in range(T):  # by swap, each pair exactly
        ids = base.probe.ids_BT.clone()
        ids[0, s] = 3 + (ids[0, s] + 17) % (V - 3)
        moved_BT = (base.probe.hidden(ids) - base.probe.base).abs().amax(-1) > 0
        assert (moved_BT[0].numpy() == reach_ST[s]).all(), s
        assert not moved_BT[1:].any()

    # What the measurement says of its pairs; a block that moved a position stands at its token nearest to it.
    matrix_ST = found.matrix_ST
    assert not ((matrix_ST == 0) & reach_ST).any()
    for s, t in np.argwhere(matrix_ST > 0):
        assert reach_ST[s:, t].any() if s >= t else reach_ST[: s + 1, t].any(), (s, t)

    future_ST = np.tril(np.ones((T, T), dtype=bool), -1)
    leaks = bool((reach_ST & future_ST).any())
    note(f"future pairs: {np.argwhere(reach_ST & future_ST).tolist()}, {verdict.outcome}, {verdict.reason}")
    assert (verdict.outcome is Outcome.FOUND) == leaks or (leaks and verdict.outcome is Outcome.UNKNOWN)


@QUICK
@given(exponent=st.floats(-9.0, -1.0), layers=st.integers(1, 3))
def test_a_planted_effect_above_the_floor_is_seen_and_clear_claims_no_more(exponent: float, layers: int) -> None:
    strength = 10**exponent
    model = Masked([torch.ones(T, T).tril().bool()] * layers, strength=strength).train()
    twin_ST = slow_twin(model, tokens())
    past = twin_ST[np.triu_indices(T, 1)]
    relative = float(twin_ST[np.tril_indices(T, -1)].max() / np.median(past))
    note(f"relative influence by definition: {relative:.3g}")
    _, verdict = look(model)
    if relative > 5 * SWAP_WARNING_RATIO:
        assert verdict.outcome is Outcome.FOUND
    if verdict.outcome is Outcome.CLEAR:
        assert verdict.power is not None
        assert relative < 5 * verdict.power.smallest_detectable
        assert verdict.power.smallest_detectable >= GRADIENT_WARNING_RATIO
    assert verdict.outcome is not Outcome.UNKNOWN  # the whole past is visible: there is power


def test_just_below_the_stated_power_is_clear_and_says_how_much_it_would_have_seen() -> None:
    _, verdict = look(Masked([torch.ones(T, T).tril().bool()] * 2, strength=1e-9).train())
    assert verdict.outcome is Outcome.CLEAR
    assert verdict.power is not None
    assert 0 < verdict.power.smallest_detectable <= SWAP_WARNING_RATIO
