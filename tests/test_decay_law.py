"""The decay law against a step by step product."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ghoststep.decay_law import Schedule, crossing_of, exponents


def product(schedule: Schedule, decay: float, steps: int) -> float:
    """-log of the product of (1 - c · lr_t): the definition."""
    return -sum(math.log1p(-decay * schedule.lr(t)) for t in range(steps))


SCHEDULES = {
    "constant": Schedule(kind="constant", peak=1e-2),
    "constant with warm-up": Schedule(kind="constant", peak=1e-2, warm_up=600),
    "linear": Schedule(kind="linear", peak=2.5e-2, warm_up=600, total=20_000),
    "cosine to a tenth": Schedule(kind="cosine", peak=2e-2, warm_up=600, total=12_000, floor=0.1),
    "cosine": Schedule(kind="cosine", peak=3e-2, warm_up=300, total=12_000),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_closed_form_crosses_where_the_product_does(name: str) -> None:
    schedule = SCHEDULES[name]
    needed, sum_, step = math.log(1e6), 0.0, 0
    while sum_ < needed:
        sum_ -= math.log1p(-0.1 * schedule.lr(step))
        step += 1
    predicted = schedule.crossing(1.0, 1e-6, 0.1, horizon=30_000)
    assert predicted is not None
    assert abs(predicted - step) <= max(2, step * 1e-3)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    peak=st.floats(1e-5, 0.2),
    warm_up=st.integers(0, 300),
    more=st.integers(1, 700),
    floor=st.floats(0, 1),
    share=st.floats(0, 1.3),
)
def test_the_exponent_is_the_products(kind: str, peak: float, warm_up: int, more: int, floor: float, share: float) -> None:
    schedule = Schedule(kind=kind, peak=peak, warm_up=warm_up, total=warm_up + more, floor=floor)
    steps = int(share * (warm_up + more))
    exact = product(schedule, 0.1, steps)
    assert abs(schedule.exponent(steps, 0.1) - exact) <= 1e-3 * exact + 0.1 * peak  # one step of rounding at the seams


def test_sampled_curves_agree_with_the_closed_form() -> None:
    schedule = SCHEDULES["cosine to a tenth"]
    steps = list(range(0, 12_001, 3))
    found = exponents(steps, [schedule.lr(t) for t in steps], 0.1)
    assert found[-1] == pytest.approx(product(schedule, 0.1, 12_000), rel=1e-4)
    assert crossing_of(steps, found, 1.0, 1e-4) == pytest.approx(schedule.crossing(1.0, 1e-4, 0.1, horizon=12_000), abs=2)


def test_a_run_too_short_never_crosses() -> None:
    assert Schedule(kind="constant", peak=1e-3).crossing(1.0, 1e-6, 0.1, horizon=100_000) is None
    assert crossing_of([0, 100], [0.0, 1.0], 1.0, 1e-6) is None


def test_a_row_below_the_line_has_crossed_already() -> None:
    assert Schedule(kind="constant", peak=1e-3).crossing(1e-7, 1e-6, 0.1) == 0
    assert crossing_of([0, 100], [0.0, 1.0], 1e-7, 1e-6) == 0
