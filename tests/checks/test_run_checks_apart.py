"""GS422 and GS415 of a run, on records: found, and silent for a healthy twin and for near misses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ghoststep.answers import Answer, Clear, Found, NotApplicable, Unknown
from ghoststep.checks.steps.clipped_before_unscale import clipped_before_unscale
from ghoststep.checks.steps.ranks_apart import ranks_apart
from ghoststep.evidence.base import Missing
from ghoststep.evidence.steps import OWN_GRADIENTS, RunRecord, Step, StepOutcome
from ghoststep.finding import Outcome
from tests.checks.run_builders import dead, healthy, nan_clipped, put, record, run, skipped, step, window, zeroed

NO_SETUP = Missing(reason="no setup", outcome=Outcome.NOT_APPLICABLE, is_absent=True)


def unclipped(count: int, seed: int, **more: Any) -> list[Step]:
    """What this rank's own data gave, as the optimizer got it."""
    return [replace(s, norm_after=s.norm, trunk_norm_after=s.trunk_norm, clip_bound=None, **more) for s in healthy(count, seed)]


def other(steps: Sequence[Step]) -> list[Step]:
    """With a norm that is 5 % larger."""
    return [replace(s, norm=1.05 * (s.norm or 0), norm_after=1.05 * (s.norm_after or 0)) for s in steps]


def own_data(seed: int, count: int = 40) -> list[Step]:
    """Clipped in every step; the table's share differs from step to step."""
    return [
        replace(s, norm_after=0.01, trunk_norm_after=0.01 * (0.9 + 0.02 * math.sin(s.number * (seed + 1))), clip_bound=0.01)
        for s in healthy(count, seed)
    ]


class TestApart:
    def test_found(self) -> None:
        answered = ranks_apart(run(unclipped(40, 1), unclipped(40, 2), unclipped(40, 1)))
        assert isinstance(answered, Found)
        (finding,) = answered.findings
        assert (finding.where.step, finding.where.rank) == (1, 1)
        assert "of 40 steps that 3 ranks have in common (step 1: a norm of" in finding.message
        assert "ddp(x)" in finding.message

    def test_found_behind_one_bound(self) -> None:
        assert isinstance(ranks_apart(run(own_data(1), own_data(2))), Found)
        moved = [[replace(s, trunk_norm_after=0.01) for s in own_data(seed)] for seed in (1, 2)]  # no table
        assert isinstance(ranks_apart(run(*moved)), Found)

    def test_what_may_be_apart_on_purpose(self) -> None:
        ranks = run(unclipped(40, 1), unclipped(40, 2), unseen={OWN_GRADIENTS: "DDP has the communication hook local_sgd"})
        answered = ranks_apart(ranks)
        assert isinstance(answered, Unknown)
        assert "local_sgd" in answered.reason
        alike = run(unclipped(40, 1), unclipped(40, 1), unseen={OWN_GRADIENTS: "DDP has a hook"})
        assert isinstance(ranks_apart(alike), Clear)

    def test_a_reduction_by_hand_before_the_clip(self) -> None:
        """What was measured after backward is each rank's own; everything behind the clip is the same."""
        first = own_data(1)
        second = [replace(s, norm=b.norm) for s, b in zip(first, own_data(2), strict=True)]
        assert isinstance(ranks_apart(run(first, second)), Clear)

    @pytest.mark.parametrize(("apart", "kind"), [(0, Clear), (7, Clear), (8, Unknown), (20, Unknown), (21, Found), (40, Found)])
    def test_how_many(self, apart: int, kind: type[Answer]) -> None:
        first = unclipped(40, 1)
        answered = ranks_apart(run(first, put(first, *other(first[:apart]))))
        assert isinstance(answered, kind)

    @pytest.mark.parametrize(("count", "apart", "kind"), [(7, 7, Unknown), (8, 8, Found), (8, 7, Unknown), (8, 4, Clear)])
    def test_few_steps(self, count: int, apart: int, kind: type[Answer]) -> None:
        first = unclipped(count, 1)
        assert isinstance(ranks_apart(run(first, put(first, *other(first[:apart])))), kind)

    def test_rounding(self) -> None:
        first = unclipped(40, 1)
        close = [replace(s, norm_after=(s.norm_after or 0) * (1 + 5e-4)) for s in first]
        assert isinstance(ranks_apart(run(first, close)), Clear)

    def test_lost_steps_are_left_out(self) -> None:
        """One rank's bad steps look unlike the other's: they are told by their own checks."""
        first = unclipped(40, 1)
        kinds: tuple[Callable[[int], Step], ...] = (zeroed, nan_clipped, dead, lambda n: skipped(n, 2.0))
        bad = [kind(n) for i, kind in enumerate(kinds) for n in range(1 + 8 * i, 9 + 8 * i)]
        answered = ranks_apart(run(first, put(first, *bad)))
        assert isinstance(answered, Clear)
        assert "8 steps of 2 ranks compared" in (answered.reason or "")

    @pytest.mark.parametrize("shift", [-40, -3, 1, 32])
    def test_ranks_that_are_numbered_apart(self, shift: int) -> None:
        """As after a kill and a resume."""
        first = unclipped(200, 1)
        answered = ranks_apart(run(first, [replace(s, number=s.number + shift) for s in first if s.number + shift > 0]))
        assert isinstance(answered, Unknown)
        assert f"{abs(shift)} {'later' if shift > 0 else 'earlier'} than rank 0" in answered.reason

    def test_no_answer(self) -> None:
        one = record(unclipped(40, 1), 0, world_size=2, parallelism="DDP")
        assert isinstance(ranks_apart(run(one, is_live=True)), Unknown)
        assert isinstance(ranks_apart(run(unclipped(40, 1), [])), Unknown)
        assert isinstance(ranks_apart(run([], [])), Unknown)
        assert isinstance(ranks_apart(run(unclipped(40, 1))), NotApplicable)
        for kind in ("FSDP1", "FSDP2", "DTensor", ""):
            assert isinstance(ranks_apart(run(unclipped(40, 1), unclipped(40, 2), parallelism=kind)), NotApplicable)


def cut(count: int, *, start: int = 1, scale: float = 65536.0, bound: float = 1.0, **more: Any) -> list[Step]:
    """Clipped while the scale was on."""
    return [step(n, scale=scale, clip_bound=bound, norm_after=bound / scale, **more) for n in range(start, start + count)]


def unscaled(run_record: RunRecord) -> Answer:
    return clipped_before_unscale(NO_SETUP, NO_SETUP, run_record)


class TestUnscaled:
    def test_found(self) -> None:
        answered = unscaled(run(cut(40)))
        assert isinstance(answered, Found)
        (finding,) = answered.findings
        assert finding.where.step == 1
        assert "in 40 steps in a row, from step 1 on" in finding.message
        assert "1 / 65536 = 1.53e-05" in finding.message
        assert "8.19e+04 times too short" in finding.message

    @pytest.mark.parametrize(("count", "is_found"), [(4, False), (5, True)])
    def test_in_a_row(self, count: int, is_found: bool) -> None:
        whole = put([replace(s, scale=65536.0) for s in healthy(40)], *cut(count, start=11))
        assert isinstance(unscaled(run(whole)), Found if is_found else Clear)

    def test_skips_between(self) -> None:
        steps = [*cut(20), skipped(21, 65536.0), *cut(20, start=22, scale=32768.0)]
        answered = unscaled(run([skipped(1, 131072.0), *steps[1:]]))
        assert isinstance(answered, Found)
        assert answered.findings[0].where.step == 2

    def test_live_and_replayed_agree(self) -> None:
        whole = run(cut(400))
        answered, seen = unscaled(whole), unscaled(window(whole, 0, 32))
        assert isinstance(answered, Found)
        assert isinstance(seen, Found)
        assert seen.findings[0].where == answered.findings[0].where
        assert isinstance(unscaled(window(whole, 100, 400)), Clear)  # its first step was judged before

    @pytest.mark.parametrize("scale", [1.0, 2.0, 1024.0, 65536.0])
    def test_unscaled_first(self, scale: float) -> None:
        assert not isinstance(unscaled(run([replace(s, scale=scale) for s in healthy(100)])), Found | Unknown)

    @pytest.mark.parametrize(
        "more",
        [
            {"clip_bound": None},
            {"clip_bound": math.inf},
            {"clip_action": "skipped"},
            {"norm": 2e-5},
            {"norm_after": 1.6e-5},
            {"outcome": StepOutcome.SKIPPED_BY_POLICY},
        ],
        ids=str,
    )
    def test_near_misses(self, more: dict[str, Any]) -> None:
        assert not isinstance(unscaled(run([replace(s, **more) for s in cut(40)])), Found | Unknown)

    def test_a_bound_that_is_multiplied_by_the_scale(self) -> None:
        def scaled_bound(bound: float, scales: Sequence[float]) -> Answer:
            parts = [cut(20, start=1 + 20 * i, scale=s, bound=bound * s, norm=9.0) for i, s in enumerate(scales)]
            return unscaled(run([s for part in parts for s in part]))

        assert isinstance(scaled_bound(1.0, [65536.0]), Clear)
        assert isinstance(scaled_bound(0.1, [65536.0, 131072.0]), Clear)
        assert isinstance(scaled_bound(0.001, [1024.0, 2048.0]), Clear)
        assert isinstance(scaled_bound(0.1, [65536.0]), Unknown)

    def test_a_small_scale_that_grows(self) -> None:
        assert isinstance(unscaled(run(cut(20, scale=8.0))), Unknown)
        assert isinstance(unscaled(run([*cut(20, scale=8.0), *cut(20, start=21, scale=16.0)])), Found)

    def test_no_answer(self) -> None:
        assert isinstance(unscaled(run(healthy(40))), NotApplicable)
        assert isinstance(unscaled(run([])), Unknown)
        assert isinstance(unscaled(run(cut(4))), Unknown)
        assert isinstance(unscaled(run([replace(s, norm_after=None) for s in cut(40)])), Unknown)
        assert isinstance(clipped_before_unscale(NO_SETUP, NO_SETUP), NotApplicable)
