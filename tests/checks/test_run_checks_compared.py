"""What checks say of steps that they could not compare: a run that is NaN is not called clear, a single bad step does not hide it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ghoststep.checks.steps.crushed_step import crushed_step
from ghoststep.checks.steps.exploding_gradient import exploding_gradient
from ghoststep.checks.steps.flat_loss import flat_loss
from ghoststep.checks.steps.nonfinite_gradient import nonfinite_gradient
from ghoststep.checks.steps.oscillating_loss import oscillating_loss
from ghoststep.checks.steps.unchanged_weights import unchanged_weights
from ghoststep.checks.steps.vanishing_gradient import vanishing_gradient
from ghoststep.evidence.steps import RunRecord, Step, StepOutcome, TableFacts, TensorOutlier
from ghoststep.registry import Answer, NotApplicable, Unknown, load
from ghoststep.step_comparison import not_compared
from tests.checks.run_builders import (
    crushed,
    dead,
    every,
    healthy,
    nan_clipped,
    put,
    record,
    run,
    skipped,
    step,
    window,
    zeroed,
)
from tests.checks.test_run_checks_lost import ABSENT, found, is_clear

Check = Callable[[RunRecord], Answer]
CHECKS: dict[str, Check] = {
    "crushed": crushed_step,
    "flat": flat_loss,
    "oscillating": oscillating_loss,
    "exploding": exploding_gradient,
    "vanishing": vanishing_gradient,
    "gradient": lambda r: nonfinite_gradient(ABSENT, r),
    "unchanged": lambda r: unchanged_weights(ABSENT, ABSENT, r),
}


def died(at: int, count: int = 200) -> list[Step]:
    return [*healthy(at - 1), *(dead(n) for n in range(at, count + 1))]


@pytest.mark.parametrize("name", CHECKS)
class TestEveryCheck:
    def test_a_run_that_is_nan_is_not_clear(self, name: str) -> None:
        said = CHECKS[name](run(died(31)))
        assert isinstance(said, Unknown)
        assert "170 of 200 steps could not be compared: the loss is NaN from step 31 on (hidden-nan-loss judges" in said.reason

    def test_the_last_twenty_decide(self, name: str) -> None:
        assert isinstance(CHECKS[name](run(died(181))), Unknown)
        said = CHECKS[name](run(died(182)))
        assert is_clear(said)
        assert "19 of 200 steps could not be compared" in str(said.reason)
        assert is_clear(CHECKS[name](run([*died(160, 180), *healthy(20, start=181)])))

    def test_one_step_is_told_beside_a_clear(self, name: str) -> None:
        said = CHECKS[name](run(put(healthy(200), dead(77))))
        assert is_clear(said)
        assert "; 1 of 200 steps could not be compared: the loss is NaN in step 77 (hidden-nan-loss judges" in str(said.reason)
        assert "compared" not in str(CHECKS[name](run(healthy(200))).reason)

    def test_live_as_afterwards(self, name: str) -> None:
        assert isinstance(CHECKS[name](window(run(died(800, 1000)), 488, 1000)), Unknown)
        assert is_clear(CHECKS[name](window(run(died(990, 1000)), 488, 1000)))

    def test_the_rank_that_is_worst_is_named(self, name: str) -> None:
        said = CHECKS[name](run(healthy(200), died(31)))
        assert isinstance(said, Unknown)
        assert "170 of 200 steps of rank 1" in said.reason


def test_what_was_found_stays_found() -> None:
    outlier = (TensorOutlier(parameter="w", norm=30.0, typical=1e-2),)
    steps = put(died(101), step(80, norm=3e3, trunk_norm=3e3, outliers=outlier), crushed(90))
    (one,) = (said := exploding_gradient(run(steps))).findings  # type: ignore[union-attr]
    assert one.where.step == 80
    assert "100 of 200 steps" in str(said.reason)
    assert found(crushed_step(run(steps)))[0].where.step == 90


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (zeroed, "every gradient was set to zero from step 101 on (zeroed-step judges"),
        (nan_clipped, "gradients became NaN after backward from step 101 on (nan-by-infinite-clip judges"),
        (lambda n: skipped(n, 64.0), "the loss scaler skipped from step 101 on (skipped-by-scaler judges"),
        (lambda n: skipped(n, 64.0, loss=math.inf), "the loss times its loss scale is infinite from step 101 on (skipped-"),
        (lambda n: step(n, norm=math.inf), "the gradient norm is infinite from step 101 on"),
        (
            lambda n: step(n, norm=math.inf, scale=2.0**90),
            "the gradient norm times the loss scale is infinite from step 101 on",
        ),
        (lambda n: step(n, norm=None), "no gradient norm was seen from step 101 on"),
        (lambda n: step(n, norm=math.nan, num_nonfinite_before=3), "gradients are not finite from step 101 on (nonfinite-"),
    ],
)
def test_the_cause_is_what_the_steps_show(bad: Callable[[int], Step], text: str) -> None:
    said = not_compared(run([*healthy(100), *(bad(n) for n in range(101, 131))]), ("norm",))
    assert text in str(said.undecided)
    known = {c.name for c in load(with_instruments=False, plugins=False).checks}
    if "(" in text:
        assert str(said.undecided).split("(")[1].split()[0] in known


def test_a_scaler_that_finds_its_scale_hides_nothing() -> None:
    start = [*(skipped(n, 65536 / 2 ** (n - 1)) for n in range(1, 9)), *every(healthy(300, start=9), scale=256.0)]
    for name, ask in CHECKS.items():
        assert is_clear(ask(run(start))), name
    endless = [*healthy(10), *(skipped(n, 1.0) for n in range(11, 200))]
    assert isinstance(CHECKS["gradient"](run(endless)), Unknown)
    assert is_clear(CHECKS["crushed"](run(endless))), "a step that was skipped is not crushed"


def test_ranks_that_never_see_a_loss_are_left_out() -> None:
    """Of a pipeline only the last rank has one."""
    assert is_clear(flat_loss(run(every(healthy(200), loss=None), healthy(200))))


def test_a_step_whose_gradients_are_finite_was_judged_whatever_its_loss() -> None:
    ignored = every(healthy(60), loss=math.nan, norm=0.0, norm_after=0.0, num_zero_before=12, num_zero_after=12)
    assert is_clear(CHECKS["gradient"](run(ignored)))
    own_clip = every(healthy(60), norm=math.inf, norm_after=1.0, clip_action="capped rows")
    assert is_clear(CHECKS["crushed"](run(own_clip)))
    assert is_clear(CHECKS["crushed"](run([zeroed(n) for n in range(1, 60)])))
    assert is_clear(CHECKS["crushed"](run(every(healthy(60), outcome=StepOutcome.SKIPPED_BY_SCALER, norm=math.nan))))


def table(*, trains: bool) -> TableFacts:
    return TableFacts(name="embed.weight", num_rows=10, num_dims=4, is_trainable=trains, is_tied=False)


BLIND = [replace(s, tables_norm=None, rows=()) for s in healthy(40)]


class TestNoTable:
    def of(self, steps: Sequence[Step], **facts: Any) -> Answer:
        return crushed_step(run(steps, **{"trainable": ("a", "b"), **facts}))

    def test_a_model_without_one(self) -> None:
        said = self.of(BLIND)
        assert isinstance(said, NotApplicable)
        assert said.reason == "the model has no embedding table"

    def test_a_frozen_one(self) -> None:
        said = self.of(BLIND, tables=(table(trains=False),))
        assert isinstance(said, NotApplicable)
        assert said.reason == "the model has no embedding table that trains"

    @pytest.mark.parametrize(
        "facts",
        [
            {"tables": (table(trains=True),)},  # one that trains and was not seen
            {"trainable": ()},  # the manifest was lost
            {"world_size": 2},  # another part of the model, on another rank, may have it
            {"unseen": {"rows of bags": "nn.EmbeddingBag joins its rows before a gradient can be seen"}},
        ],
    )
    def test_what_was_not_seen_stays_unknown(self, facts: dict[str, Any]) -> None:
        assert isinstance(self.of(BLIND, **facts), Unknown)

    def test_nothing_else_trains(self) -> None:
        only = every(healthy(40), trunk_norm=None, trunk_norm_after=None)
        said = self.of(only, trainable=("embed.weight",), tables=(table(trains=True),))
        assert isinstance(said, NotApplicable)
        assert "nothing but embedding tables trains" in said.reason
        assert isinstance(self.of(only, trainable=("embed.weight", "a"), tables=(table(trains=True),)), Unknown)

    def test_what_was_seen_is_judged(self) -> None:
        steps = put(healthy(40), crushed(30))
        assert len(found(self.of(steps))) == 1
        assert len(found(self.of(steps, tables=(table(trains=False),)))) == 1, "it was thawed later"
        two = RunRecord(ranks=(record(BLIND, trainable=("a",)), record(steps, 1, trainable=("a",))))
        assert len(found(crushed_step(two))) == 1
