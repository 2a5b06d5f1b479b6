"""The keys: each documented, none made up, and what counts as a lost step."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ghoststep.evidence.steps import Step, StepOutcome, TensorOutlier
from ghoststep.sinks import SPECS
from ghoststep.sinks.keys import KEYS, alarm_key, is_lost, metrics, summary
from tests.sinks.made_up import healthy, place, run, zeroed


def test_a_step_as_numbers() -> None:
    found = metrics(healthy(3))
    assert found["ghoststep/steps/number"] == 3
    assert found["ghoststep/loss/value"] == pytest.approx(4.97)
    assert found["ghoststep/gradient/norm_before"] == 2
    assert found["ghoststep/gradient/norm_after"] == 1
    assert (found["ghoststep/optimizer/lr_0"], found["ghoststep/optimizer/lr_1"]) == (1e-3, 1e-4)
    assert (found["ghoststep/steps/lost"], found["ghoststep/steps/skipped"]) == (0, 0)
    assert found["ghoststep/weights/moved"] == 1e-4
    assert found["ghoststep/steps/tokens"] == 32
    assert all(type(value) is float for value in found.values())


def test_what_was_not_seen_has_no_key_and_what_is_not_finite_stays() -> None:
    bare = metrics(Step(number=1, ended_at=0.0))
    assert not [key for key in bare if key.split("/")[1] in ("loss", "rows", "optimizer", "weights")]
    assert "ghoststep/gradient/norm_before" not in bare
    assert math.isinf(metrics(zeroed(2))["ghoststep/gradient/norm_before"])
    assert math.isnan(metrics(replace(healthy(1), loss=math.nan))["ghoststep/loss/value"])


def test_the_place_with_the_largest_gradient_is_the_one_that_is_told() -> None:
    found = metrics(zeroed(2))
    assert (found["ghoststep/rows/token_id"], found["ghoststep/rows/position"], found["ghoststep/rows/example"]) == (17, 8, 1)
    assert found["ghoststep/rows/largest_gradient"] == 1e26
    assert found["ghoststep/rows/norm_before"] == 1e-30
    assert "ghoststep/rows/norm_after" not in found
    nan = replace(zeroed(2), rows=(place(17, 1e26), place(3, math.nan)))
    assert metrics(nan)["ghoststep/rows/token_id"] == 3


def test_every_key_is_documented_and_has_one_form() -> None:
    full = replace(
        zeroed(2), scale=2.0, moved=0.1, tables_norm=1.0, trunk_norm=1.0, trunk_norm_after=1.0, num_graph_nodes=9,
        rows=(replace(place(1, 1.0), row_norm_after=1.0),), outliers=(TensorOutlier(parameter="w", norm=9.0, typical=1.0),),
    )  # fmt: skip
    found = metrics(full)
    assert all(re.fullmatch(r"ghoststep/[a-z]+/[a-z_0-9]+", key) for key in (*found, alarm_key("GS401").lower()))
    assert {re.sub(r"lr_\d+", "lr_N", key.removeprefix("ghoststep/")) for key in found} == set(KEYS)


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({}, True),
        ({"num_zero_after": 8}, False),
        ({"num_zero_before": 9}, False),  # equal rewards: nothing to learn was there before the clip
        ({"num_gradients": 0, "num_zero_after": 0}, False),
        ({"outcome": StepOutcome.SKIPPED_BY_SCALER}, False),
        ({"outcome": StepOutcome.SKIPPED_BY_POLICY}, False),
        ({"num_zero_after": 0, "num_nonfinite_after": 1}, True),
        ({"num_zero_after": 0, "num_nonfinite_before": 1}, False),  # mended before the optimizer saw it
    ],
)
def test_lost(change: dict[str, object], lost: bool) -> None:
    step = replace(zeroed(1), **change)  # type: ignore[arg-type]
    assert is_lost(step) is lost
    assert metrics(step)["ghoststep/steps/lost"] == lost
    assert metrics(step)["ghoststep/steps/skipped"] == (step.outcome is not StepOutcome.STEPPED)


def test_a_summary_loses_no_lost_step() -> None:
    found = summary([metrics(step) for step in run(32, lost=20)])
    assert found["ghoststep/steps/lost"] == 1
    assert found["ghoststep/steps/number"] == 32
    assert found["ghoststep/steps/tokens"] == 32 * 32
    assert math.isinf(found["ghoststep/gradient/norm_before"])
    assert found["ghoststep/gradient/norm_after"] == 1
    assert found["ghoststep/rows/token_id"] == 17
    assert found["ghoststep/loss/value"] == pytest.approx(4.68)


def test_in_a_summary_nan_is_the_largest() -> None:
    steps = [replace(healthy(1), norm=math.nan), replace(healthy(2), norm=5.0), replace(healthy(3), norm=math.inf)]
    assert math.isnan(summary([metrics(step) for step in steps])["ghoststep/gradient/norm_before"])
    assert summary([metrics(step) for step in steps[1:]])["ghoststep/gradient/norm_before"] == math.inf
    assert summary([]) == {}


def test_the_page_lists_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sinks.md").read_text(encoding="utf-8")
    for key, told in KEYS.items():
        assert f"| `ghoststep/{key}` | {told} |" in page
    for spec in SPECS:
        assert f"| `{spec}` |" in page
