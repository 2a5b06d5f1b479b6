"""Observing changes nothing, bit for bit: drawn over models, modes, optimizers and what a process may have set."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, note, reject, settings

import ghoststep
from ghoststep.finding import Outcome
from tests.live.unchanged_models import FAMILIES
from tests.live.unchanged_plans import OPTIMIZERS, Plan, make, one_step, plans, process
from tests.live.unchanged_world import bits, changes, surroundings, world

NUM_PLANS = int(os.environ.get("GHOSTSTEP_PLANS", "20"))
"""How many plans the property draws; more in a nightly run."""


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prepared(plan: Plan) -> dict[str, Any]:
    """The setup of a plan after its first steps."""
    made = make(plan)
    with torch.enable_grad():
        for i in range(plan.steps_before):
            one_step(made, _copied(made["batches"][i % 2]))
        if plan.left:
            one_step({**made, "optimizer": None, "scheduler": None, "scaler": None}, _copied(made["batches"][0]))
    return made


def _copied(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in batch.items()}


def trained(made: dict[str, Any], *, steps: int = 3) -> list[Any]:
    """Losses of the next real steps (or the error that ends them), then parameters, buffers and randomness, as bits."""
    losses: list[Any] = []
    with torch.enable_grad(), contextlib.suppress(_EndedError):
        for i in range(steps):
            batch = _copied(made["batches"][i % 2])
            step = made.get("train_step")
            try:
                losses.append(
                    step(made["model"], made["optimizer"], batch) if step is not None else float(one_step(made, batch))
                )
            except (RuntimeError, ValueError) as error:  # NaN under anomaly mode, a scaler on float16
                losses.append(str(error))
                raise _EndedError from error
    kept = [(name, bits(t)) for name, t in [*made["model"].named_parameters(), *made["model"].named_buffers()]]
    return [repr(losses), kept, surroundings()["rng torch"], surroundings()["rng numpy"], surroundings()["rng python"]]


class _EndedError(Exception):
    pass


def assert_unchanged(plan: Plan) -> None:
    with warnings.catch_warnings(), process(plan):
        warnings.simplefilter("ignore")
        try:
            bare = trained(prepared(plan))
        except (RuntimeError, ValueError):  # what comes before is not possible: a layer without float16, NaN in the first step
            reject()
        made = prepared(plan)
        before = world(made)
        report = ghoststep.check(**{k: v for k, v in made.items() if v is not None}, fast=plan.fast)
        differing = changes(before, world(made))
        assert not differing, "\n".join(differing)
        assert trained(made) == bare
    broken = [f"{v.code}: {v.reason}" for v in report.verdicts if v.outcome is Outcome.BROKEN]
    assert not broken, broken


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    assert_unchanged(Plan(family=family, steps_before=1, left=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer(kind: str) -> None:
    assert_unchanged(Plan(family="batch norm", optimizer=kind, schedule="one cycle", own_step=kind == "lbfgs", steps_before=1))


@settings(
    max_examples=NUM_PLANS, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(plan=plans())
@example(plan=Plan(family="llama, dynamic rotary", negative_zeros=True, dtype=torch.bfloat16))
@example(plan=Plan(family="set by the first batch", grad_mode=False))
def test_nothing_changes(plan: Plan) -> None:
    note(str(plan))
    assert_unchanged(plan)
