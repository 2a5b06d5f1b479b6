"""Checks on wiring and steps as pure functions of facts built by hand: what a live setup reaches only with difficulty."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ghoststep.checks.setup.clip_bound_not_positive import clip_bound_not_positive
from ghoststep.checks.setup.decay_on_frozen_rows import decay_on_frozen_rows
from ghoststep.checks.setup.missing_warm_up import missing_warm_up
from ghoststep.checks.setup.orphan_in_optimizer import orphan_in_optimizer
from ghoststep.checks.setup.parameter_without_optimizer import parameter_without_optimizer
from ghoststep.checks.setup.trained_not_saved import trained_not_saved
from ghoststep.checks.steps.nonfinite_gradient import nonfinite_gradient
from ghoststep.checks.steps.skipped_by_scaler import skipped_by_scaler
from ghoststep.checks.steps.unchanged_weights import unchanged_weights
from ghoststep.evidence.base import Missing
from ghoststep.evidence.training import (
    ClipBound,
    Gradient,
    LiveWiring,
    OptimizerGroup,
    Orphan,
    ParameterFacts,
    ParameterSteps,
    RowSteps,
    SavedState,
    ScheduleFacts,
    StepFacts,
    StepProbe,
    TableSignal,
)
from ghoststep.finding import Severity
from ghoststep.registry import Clear, Found, NotApplicable, Unknown

NO_PROBE = Missing(reason="--fast takes no optimizer steps")


def parameter(name: str = "table.weight", **more: Any) -> ParameterFacts:
    values: dict[str, Any] = {
        "aliases": (), "shape": (64, 8), "dtype": "float32", "num_elements": 512, "trainable": True, "group": 0,
        "gradient": Gradient.NORMAL, "gradient_norm": 1.0,
    }  # fmt: skip
    return ParameterFacts(name=name, **{**values, **more})


def group(**more: Any) -> OptimizerGroup:
    values: dict[str, Any] = {
        "index": 0,
        "optimizer": "AdamW",
        "lr": 1e-3,
        "initial_lr": None,
        "weight_decay": 0.1,
        "num_tensors": 2,
    }
    return OptimizerGroup(num_frozen=0, **{**values, **more})


def wiring(**more: Any) -> LiveWiring:
    values: dict[str, Any] = {
        "parameters": (parameter(), parameter("out.weight")), "groups": (group(),), "orphans": (), "has_optimizer": True,
        "holds_copies": False, "gradient_reason": "", "loss": 2.0, "grad_mode_before": True, "grad_mode_after": True,
    }  # fmt: skip
    return LiveWiring(**{**values, **more})


def moved(**more: Any) -> ParameterSteps:
    values: dict[str, Any] = {
        "name": "table.weight", "dtype": "bfloat16", "group": 0, "norms": (1.0, 1.0), "num_elements": 512, "num_pushed": 512,
        "num_changed": 512, "num_lost": 0, "max_change": 1e-3, "leftover": 0.0, "largest_gradient": 1.0, "typical_value": 0.02,
    }  # fmt: skip
    return ParameterSteps(**{**values, **more})


def probe(*parameters: ParameterSteps, **more: Any) -> StepProbe:
    step = StepFacts(lrs=(1e-3,), gradient_norm=1.0, backward_norm=1.0, num_micro_batches=1)
    values: dict[str, Any] = {
        "is_users": True, "num_calls": 2, "steps": (step, step), "parameters": parameters or (moved(),), "rows": (),
        "num_skipped": 0, "scales": None, "scheduler_steps": None, "scheduler_is_bound": True, "lrs_ahead": math.nan,
        "changed_outside": (), "grad_mode_after": True,
    }  # fmt: skip
    return StepProbe(**{**values, **more})


@pytest.mark.parametrize(("bound", "bad"), [(0.0, True), (-1.0, True), (math.nan, True), (1.0, False), (math.inf, False)])
def test_clip_bound(bound: float, bad: bool) -> None:
    assert isinstance(clip_bound_not_positive(ClipBound(max_grad_norm=bound)), Found if bad else Clear)


class TestDecay:
    table = TableSignal(parameter="table.weight", fed_rows=(3, 4, 5), masked_rows=(3, 4))

    def test_arithmetic_where_no_step_is_taken(self) -> None:
        found = decay_on_frozen_rows(wiring(tables=(self.table,)), NO_PROBE)
        assert isinstance(found, Found)
        assert found.findings[0].severity is Severity.ERROR
        assert "1 - 0.001 · 0.1" in found.findings[0].message

    def test_slow_decay_is_a_warning(self) -> None:
        found = decay_on_frozen_rows(wiring(tables=(self.table,), groups=(group(lr=1e-6),)), NO_PROBE)
        assert isinstance(found, Found)
        assert found.findings[0].severity is Severity.WARNING

    def test_without_decay_or_masked_rows(self) -> None:
        assert isinstance(
            decay_on_frozen_rows(wiring(tables=(self.table,), groups=(group(weight_decay=0.0),)), NO_PROBE), Clear
        )
        free = TableSignal(parameter="table.weight", fed_rows=(3, 4), masked_rows=())
        assert isinstance(decay_on_frozen_rows(wiring(tables=(free,)), NO_PROBE), Clear)

    def test_rows_written_back_after_each_step(self) -> None:
        rows = RowSteps(parameter="table.weight", group=0, rows=(3, 4), ratios=(1.0, 1.0))
        assert isinstance(decay_on_frozen_rows(wiring(tables=(self.table,)), probe(rows=(rows,))), Clear)

    def test_no_table(self) -> None:
        assert isinstance(decay_on_frozen_rows(wiring(), NO_PROBE), NotApplicable)


class TestNonfinite:
    def test_inf(self) -> None:
        bad = parameter("out.weight", gradient=Gradient.NONFINITE, gradient_norm=math.inf)
        found = nonfinite_gradient(wiring(parameters=(parameter(), bad)))
        assert isinstance(found, Found)
        assert found.findings[0].where.parameter == "out.weight"

    def test_a_loss_that_is_nan_is_another_cause(self) -> None:
        bad = parameter(gradient=Gradient.NONFINITE, gradient_norm=math.nan)
        assert isinstance(nonfinite_gradient(wiring(parameters=(bad,), loss=math.nan)), Unknown)

    def test_healthy(self) -> None:
        assert isinstance(nonfinite_gradient(wiring()), Clear)


class TestUnchanged:
    def test_thresholds(self) -> None:
        for lost, severity in ((512, Severity.ERROR), (300, Severity.WARNING)):
            found = unchanged_weights(wiring(), probe(moved(num_lost=lost, num_changed=512 - lost)))
            assert isinstance(found, Found)
            assert found.findings[0].severity is severity
        assert isinstance(unchanged_weights(wiring(), probe(moved(num_lost=200, num_changed=312))), Clear)

    def test_one_parameter_that_never_moves_is_a_note(self) -> None:
        still = moved(name="norm.weight", num_pushed=8, num_elements=8, num_changed=0, num_lost=8, typical_value=1.0)
        found = unchanged_weights(wiring(), probe(moved(), still))
        assert isinstance(found, Found)
        assert found.findings[0].severity is Severity.NOTE
        assert "0.0078 apart" in found.findings[0].message

    def test_early_in_a_warm_up_is_unknown(self) -> None:
        late = wiring(groups=(group(initial_lr=1.0),))
        assert isinstance(unchanged_weights(late, probe(moved(num_lost=512, num_changed=0))), Unknown)


def test_scaler_with_gradients_that_no_scale_mends() -> None:
    bad = wiring(parameters=(parameter(gradient=Gradient.NONFINITE, gradient_norm=math.inf),))
    skipped = probe(steps=(), num_skipped=3, scales=(8.0, 1.0))
    assert isinstance(skipped_by_scaler(bad, skipped), Found)
    assert isinstance(skipped_by_scaler(wiring(), skipped), Clear)
    assert isinstance(skipped_by_scaler(wiring(), probe()), NotApplicable)


def test_orphans_need_a_backward() -> None:
    orphan = Orphan(group=0, shape=(60, 8), dtype="float32", gets_gradient=False)
    assert isinstance(orphan_in_optimizer(wiring(orphans=(orphan,))), Found)
    assert isinstance(orphan_in_optimizer(wiring(orphans=(orphan,), gradient_reason="the setup has no batch")), Unknown)
    assert isinstance(orphan_in_optimizer(wiring()), Clear)


def test_missing_parameters_that_the_loss_never_uses() -> None:
    unused = parameter("pooler.weight", group=None, gradient=Gradient.NONE)
    assert isinstance(
        parameter_without_optimizer(wiring(parameters=(parameter(), unused), unused=("pooler.weight",)), NO_PROBE), Clear
    )
    used = parameter("pooler.weight", group=None)
    assert isinstance(parameter_without_optimizer(wiring(parameters=(parameter(), used)), NO_PROBE), Found)
    assert isinstance(
        parameter_without_optimizer(wiring(parameters=(parameter(), used)), probe(changed_outside=("pooler.weight",))), Clear
    )


def test_warm_up_is_only_ever_a_note() -> None:
    def facts(*lrs: float, **more: Any) -> ScheduleFacts:
        return ScheduleFacts(**{"lrs_ahead": lrs, "is_adaptive": True, "has_state": False, **more})

    assert isinstance(missing_warm_up(facts(1e-3, 9e-4)), Found)
    assert isinstance(missing_warm_up(facts(0.0, 1e-3)), Clear)
    assert isinstance(missing_warm_up(facts(1e-5, 1e-6)), Clear)
    assert isinstance(missing_warm_up(facts(1e-3, 9e-4, has_state=True)), NotApplicable)
    assert isinstance(missing_warm_up(facts(1e-3, 9e-4, is_adaptive=False)), NotApplicable)


def test_saved_state() -> None:
    assert isinstance(trained_not_saved(SavedState(num_compared=3, missing=(), different=())), Clear)
    found = trained_not_saved(SavedState(num_compared=3, missing=("a",), different=(("b", 1.0),)))
    assert isinstance(found, Found)
    assert found.findings[0].where.parameter == "a"
