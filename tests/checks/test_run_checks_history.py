"""Checks that compare a step with the steps before it, and those that count: broken, healthy twin, near misses, look-alikes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ghoststep.checks.steps.crushed_step import crushed_step
from ghoststep.checks.steps.exploding_gradient import exploding_gradient
from ghoststep.checks.steps.flat_loss import flat_loss
from ghoststep.checks.steps.growing_graph import growing_graph
from ghoststep.checks.steps.loss_spike import loss_spike
from ghoststep.checks.steps.oscillating_loss import oscillating_loss
from ghoststep.checks.steps.skipped_by_scaler import skipped_by_scaler
from ghoststep.checks.steps.unchanged_weights import unchanged_weights
from ghoststep.checks.steps.vanishing_gradient import vanishing_gradient
from ghoststep.evidence.base import Missing
from ghoststep.evidence.steps import Gap, RunRecord, Step, StepOutcome, StepRow, TensorOutlier
from ghoststep.evidence.training import OptimizerGroup
from ghoststep.finding import Outcome, Severity
from ghoststep.registry import Answer, Clear, NotApplicable, Unknown
from tests.checks.run_builders import TOKEN, crushed, every, healthy, put, record, row, run, skipped, step, window, zeroed
from tests.checks.test_run_checks_lost import found, is_clear

ABSENT = Missing(reason="needs a setup, and none was given", outcome=Outcome.NOT_APPLICABLE, is_absent=True)


class TestUnchanged:
    def of(self, steps: Sequence[Step], **facts: Any) -> Answer:
        return unchanged_weights(ABSENT, ABSENT, run(steps, **facts))

    def test_twenty_steps_and_nineteen(self) -> None:
        still = [*healthy(30), *every(healthy(20, start=31), moved=0.0)]
        (one,) = found(self.of(still))
        assert one.where.step == 31
        assert "20 steps in a row" in one.message
        assert is_clear(self.of(still[:-1]))
        assert is_clear(self.of(put(still, step(40, moved=1e-9))))

    @pytest.mark.parametrize(
        "change",
        [
            {"lrs": (0.0,)},  # warm-up from 0, or a schedule at its end
            {"lrs": (1e-3, 0.0)},
            {"lrs": (9e-5,)},  # under a tenth of the rate that was
            {"norm": 0.0, "norm_after": 0.0, "trunk_norm": 0.0},  # equal rewards
            {"norm_after": 0.0},  # zeroed
            {"norm_after": 1e-7},  # converged
            {"trunk_norm": None},  # only a table trains: the sample may miss its rows
            {"outcome": StepOutcome.SKIPPED_BY_SCALER},
        ],
    )
    def test_look_alikes(self, change: dict[str, Any]) -> None:
        assert is_clear(self.of([*healthy(30), *every(every(healthy(40, start=31), moved=0.0), **change)]))

    def test_a_warm_up_is_known_by_the_base_rate(self) -> None:
        group = OptimizerGroup(
            index=0, optimizer="AdamW", lr=1e-6, initial_lr=1e-3, weight_decay=0.0, num_tensors=3, num_frozen=0
        )
        rising = every(healthy(40), moved=0.0, lrs=(1e-6,))
        assert is_clear(self.of(rising, groups=(group,)))
        assert len(found(self.of(rising))) == 1

    def test_fifty_steps_at_no_rate_and_forty_nine(self) -> None:
        idle = [*healthy(30), *every(healthy(50, start=31), moved=0.0, lrs=(0.0, 0.0))]
        (one,) = found(self.of(idle))
        assert (one.where.step, one.severity) == (31, Severity.WARNING)
        assert "exactly 0 in 50 steps in a row" in one.message
        assert is_clear(self.of(idle[:-1]))
        assert is_clear(self.of(every(healthy(80), lrs=(0.0, 1e-3))))

    def test_a_run_of_zero_gradients_is_not_clear(self) -> None:
        """A loss that is multiplied by 0, everything frozen but a branch that is not used: weight decay alone moves the weights."""
        nothing = every(healthy(80), norm=0.0, norm_after=0.0, trunk_norm=0.0)
        for steps in (nothing, every(nothing, moved=0.0, lrs=(0.0,))):
            said = self.of(steps)
            assert isinstance(said, Unknown)
            assert "exactly zero in 80 steps" in said.reason
        assert is_clear(self.of([*nothing, step(81)]))

    def test_gradients_cleared_before_the_step_are_not_called_rounding(self) -> None:
        (one,) = found(self.of(every(healthy(40), moved=0.0, norm_after=None, trunk_norm_after=None)))
        assert "gone when the optimizer stepped" in one.message
        assert "rounding" not in one.message

    def test_unseen_and_absent(self) -> None:
        assert isinstance(self.of(every(healthy(30), moved=None)), Unknown)
        dead = [*healthy(30), *every(healthy(40, start=31), norm_after=math.nan, moved=math.nan)]
        assert isinstance(self.of(dead), Unknown)
        assert isinstance(self.of(healthy(30), unseen={"moved": "sharded"}), Unknown)
        assert isinstance(unchanged_weights(ABSENT, ABSENT), NotApplicable)


class TestScaler:
    def of(self, steps: Sequence[Step], **facts: Any) -> Answer:
        return skipped_by_scaler(ABSENT, ABSENT, run(steps, **facts))

    def taken(self, start: int, count: int, scale: float) -> list[Step]:
        return every(healthy(count, start=start), scale=scale)

    def test_no_scaler_and_no_setup(self) -> None:
        assert isinstance(self.of(healthy(30)), NotApplicable)
        assert isinstance(skipped_by_scaler(ABSENT, ABSENT), NotApplicable)

    def test_an_honest_start(self) -> None:
        falling = [skipped(n, 65536 / 2 ** (n - 1)) for n in range(1, 17)]
        assert is_clear(self.of([*falling, *self.taken(17, 300, 1.0)]))
        rough = [
            skipped(n, 65536 / 2 ** (n // 2)) if n % 2 else self.taken(n, 1, 65536 / 2 ** (n // 2))[0] for n in range(1, 31)
        ]
        assert is_clear(self.of([*rough, *self.taken(31, 300, 2.0)]))

    def test_without_end(self) -> None:
        falling = [skipped(n, 65536 / 2 ** (n - 1)) for n in range(1, 23)]
        (one,) = found(self.of(falling))
        assert "22 skips one after the other, while the scale fell" in one.message
        assert is_clear(self.of(falling[:19]))
        constant = [skipped(n, 65536.0) for n in range(1, 21)]
        assert "scaler.update() is not called" in found(self.of(constant))[0].message
        assert is_clear(self.of(constant[:19]))
        far = [skipped(n, 2.0**40 / 2 ** (n - 1)) for n in range(1, 26)]
        assert is_clear(self.of(far)), "a start from far above"
        assert "The loss itself is NaN" in found(self.of(every(constant, loss=math.nan)))[0].message

    def triggers(
        self, every_nth: int, count: int = 400, recovers: int = 0, rows: tuple[StepRow, ...] = (row(TOKEN, math.inf), row())
    ) -> list[Step]:
        """A token skips one step in `every_nth`, and the scale halves; it doubles after `recovers` steps without a skip."""
        scale, quiet, steps = 2.0**40, 0, []
        for n in range(1, count + 1):
            if n % every_nth == 0:
                steps.append(skipped(n, scale, rows=rows))
                scale, quiet = scale / 2, 0
            else:
                steps += self.taken(n, 1, scale)
                quiet += 1
                if recovers and quiet >= recovers:
                    scale, quiet = scale * 2, 0
        return steps

    def test_a_token_that_skips_again_and_again_is_named(self) -> None:
        (one,) = found(self.of(self.triggers(10)))
        assert one.where.token_id == TOKEN
        assert "token 17 ' foo" in one.message
        assert "does not recover" in one.message

    def test_where_every_place_is_nan_no_token_is_named(self) -> None:
        (one,) = found(self.of(self.triggers(10, rows=(row(TOKEN, math.nan), row(3, math.nan)))))
        assert (one.where.token_id, "token" in one.message) == (None, False)

    def test_skips_from_which_the_scale_recovers(self) -> None:
        assert is_clear(self.of(self.triggers(10, recovers=9)))
        assert is_clear(self.of(self.triggers(100)))

    def test_a_rough_start_and_one_skip_later(self) -> None:
        steps = [skipped(n, 2.0 ** (40 - n // 2)) if n % 2 else self.taken(n, 1, 2.0 ** (40 - n // 2))[0] for n in range(1, 61)]
        assert is_clear(self.of([*steps, *self.taken(61, 139, 1024.0), skipped(200, 1024.0)]))

    def test_a_scale_that_no_start_comes_to(self) -> None:
        steps = put(self.taken(1, 50, 2.0**-11), skipped(40, 2.0**-11))
        assert "still skips at a scale" in found(self.of(steps))[0].message


class TestLossSpike:
    def spiked(self, *, height: float = 7.0, length: int = 40, norm: float = 30.0, **more: Any) -> list[Step]:
        steps = healthy(200)
        spike = [replace(s, loss=height, **more) for s in healthy(length, start=121)]
        spike[0] = replace(spike[0], norm=norm)
        return put(steps, *spike)

    def test_found_at_its_first_step(self) -> None:
        (one,) = found(loss_spike(run(self.spiked())))
        assert one.where.step == 121
        assert one.measured is not None
        assert one.measured.value == 7.0

    def test_two_ranks_are_two_places(self) -> None:
        assert len(found(loss_spike(run(self.spiked(), self.spiked())))) == 2

    def test_near_misses(self) -> None:
        assert is_clear(loss_spike(run(self.spiked(length=3))))
        assert is_clear(loss_spike(run(self.spiked(height=4.5)))), "within twice the range"
        assert is_clear(loss_spike(run(self.spiked(norm=2.0)))), "another data set"
        assert is_clear(loss_spike(run(self.spiked(num_tokens=512)))), "longer batches under a summed loss"
        assert is_clear(loss_spike(run(record(self.spiked(), gaps=[Gap(after=90, reason="resumed")]))))
        assert isinstance(loss_spike(run(every(self.spiked(), loss=None))), Unknown)
        assert isinstance(loss_spike(run(self.spiked()[60:79])), Unknown), "too few steps"
        assert is_clear(loss_spike(run(self.spiked()[60:127]))), "too few steps for a history"

    def test_policy_losses_are_not_judged(self) -> None:
        chance = random.Random(0)
        steps = [replace(s, loss=chance.gauss(0, 0.01)) for s in healthy(300)]
        grown = [replace(s, loss=0.5 + chance.gauss(0, 0.01), norm=50.0) for s in healthy(20, start=200)]
        assert isinstance(loss_spike(run(put(steps, *grown))), NotApplicable)

    def test_nan_is_somebody_elses(self) -> None:
        said = loss_spike(run(self.spiked(height=math.nan)))
        assert is_clear(said)
        assert isinstance(said, Clear)
        assert "40 of 200 steps could not be compared" in (said.reason or "")
        forever = self.spiked(height=math.nan)[:140]
        assert isinstance(loss_spike(run(forever)), Unknown), "all of the last twenty"


class TestFlat:
    value = 2.5139048099517822

    def flat(self, count: int, **more: Any) -> list[Step]:
        return [replace(s, loss=self.value, **more) for s in healthy(count, start=31)]

    def test_fifty_and_forty_nine(self) -> None:
        steps = [*healthy(30), *self.flat(50), *healthy(30, start=81)]
        (one,) = found(flat_loss(run(steps)))
        assert (one.where.step, one.severity) == (31, Severity.WARNING)
        assert "50 steps" in one.message
        shorter = put(steps, replace(steps[79], loss=2.0))
        assert is_clear(flat_loss(run(shorter)))
        start = every(healthy(50), loss=self.value)
        assert found(flat_loss(run(start)))[0].where.step == 1

    def test_the_same_batch_again_is_a_note(self) -> None:
        same = self.flat(60, rows=(row(),), num_tokens=256)
        assert found(flat_loss(run([*healthy(30), *same])))[0].severity is Severity.NOTE

    @pytest.mark.parametrize(
        "loss",
        [0.0, math.log(2), 0.6931471824645996, math.log(8), 5.545177459716797, 2.515625, 0.69140625, 2.513671875],
    )
    def test_values_at_which_healthy_losses_rest(self, loss: float) -> None:
        assert is_clear(flat_loss(run(every(healthy(100), loss=loss))))

    @pytest.mark.parametrize("change", [{"moved": 0.0}, {"norm": 0.0}, {"outcome": StepOutcome.SKIPPED_BY_SCALER}])
    def test_nothing_learns(self, change: dict[str, Any]) -> None:
        assert is_clear(flat_loss(run(every(healthy(100), loss=self.value, **change))))

    def test_merely_flat(self) -> None:
        assert is_clear(flat_loss(run([replace(s, loss=self.value + 1e-6 * (s.number % 7)) for s in healthy(200)])))


class TestOscillating:
    def swing(self, amount: float, count: int = 128, **more: Any) -> list[Step]:
        return [replace(s, loss=2.0 + amount * (-1) ** s.number, **more) for s in healthy(count)]

    def test_a_note_from_forty_percent_on(self) -> None:
        (one,) = found(oscillating_loss(run(self.swing(0.9))))
        assert one.where.step == 1
        assert "45%" in one.message
        assert "1 later block" in one.message
        assert is_clear(oscillating_loss(run(self.swing(0.75))))
        assert isinstance(oscillating_loss(run(self.swing(0.9)[:63])), Unknown)
        assert isinstance(oscillating_loss(run(self.swing(0.9)[32:120])), Unknown), "no block is whole"

    def test_a_few_steps_without_a_loss_do_not_hide_it(self) -> None:
        steps = put(self.swing(0.9), *(step(n, loss=math.nan) for n in (7, 10, 70, 75)))
        (one,) = found(oscillating_loss(run(steps)))
        assert "45%" in one.message
        most = put(self.swing(0.9), *(step(n, loss=math.nan) for n in (*range(1, 18), *range(65, 82))))
        assert is_clear(oscillating_loss(run(most))), "17 of each 64 are too many"

    def test_look_alikes(self) -> None:
        falling = [replace(s, loss=12.0 - 0.18 * s.number) for s in healthy(64)]
        assert is_clear(oscillating_loss(run(falling)))
        swinging = [replace(s, loss=10.0 - 0.1 * s.number + 3.0 * (-1) ** s.number) for s in healthy(64)]
        assert is_clear(oscillating_loss(run(swinging))), "it gets somewhere"
        outlier = put([replace(s, loss=1.0 + 0.01 * (-1) ** s.number) for s in healthy(64)], step(30, loss=60.0))
        assert is_clear(oscillating_loss(run(outlier)))
        policy = [replace(s, loss=(-1.0) ** s.number) for s in healthy(128)]
        assert isinstance(oscillating_loss(run(policy)), NotApplicable)
        assert is_clear(oscillating_loss(run(put(healthy(128), policy[7]))))
        summed = [replace(s, loss=2.0 * n, num_tokens=n) for s in healthy(128) for n in [100 + 80 * (-1) ** s.number]]
        assert is_clear(oscillating_loss(run(summed)))
        assert len(found(oscillating_loss(run(every(summed, num_tokens=100))))) == 1


class TestGrowingGraph:
    def counted(self, nodes: Sequence[int], numbers: Sequence[int] = (1, 2, 3, 4, 5, 50), **more: Any) -> list[Step]:
        by_number = dict(zip(numbers, nodes, strict=False))
        return [replace(s, num_graph_nodes=by_number.get(s.number), **more) for s in healthy(60)]

    def test_steady_growth(self) -> None:
        (one,) = found(growing_graph(run(self.counted([100, 202, 304, 406, 508]))))
        assert (one.where.step, one.severity) == (1, Severity.WARNING)
        assert "102 nodes" in one.message
        (one,) = found(growing_graph(run(self.counted([100, 202, 304, 406, 508, 508 + 45 * 102]))))
        assert one.severity is Severity.ERROR

    @pytest.mark.parametrize(
        "nodes", [[100] * 6, [100, 202, 304, 406, 507, 508], [100, 80, 120, 90, 130, 100], [500, 400, 300, 200, 100, 50]]
    )
    def test_near_misses(self, nodes: list[int]) -> None:
        assert is_clear(growing_graph(run(self.counted(nodes))))

    def test_a_curriculum_of_lengths(self) -> None:
        longer = [replace(s, num_tokens=100 * s.number) for s in self.counted([100, 200, 300, 400, 500])]
        assert is_clear(growing_graph(run(longer)))

    def test_too_few_counts(self) -> None:
        assert isinstance(growing_graph(run(self.counted([100, 202, 304, 406]))), Unknown)


class TestGradients:
    def outlier(self, norm: float, typical: float = 1e-2, name: str = "layers.3.w") -> tuple[TensorOutlier, ...]:
        return (TensorOutlier(parameter=name, norm=norm, typical=typical),)

    def exploded(self, factor: float, total: float | None = None, **more: Any) -> Step:
        total = 1.25 * factor if total is None else total
        return step(80, norm=total, tables_norm=0.1, trunk_norm=total, outliers=self.outlier(1e-2 * factor), **more)

    def test_exploding_at_once(self) -> None:
        (one,) = found(exploding_gradient(run(put(healthy(100), self.exploded(3e3)))))
        assert (one.where.step, one.where.parameter) == (80, "layers.3.w")
        assert exploding_gradient.severity is Severity.WARNING

    def test_exploding_near_misses(self) -> None:
        calm = healthy(100)
        assert is_clear(exploding_gradient(run(put(calm, self.exploded(9e2)))))
        assert is_clear(exploding_gradient(run(put(calm, self.exploded(1e5, total=1.5))))), "one tensor begins to train"
        assert is_clear(exploding_gradient(run(put(calm, self.exploded(3e3, num_tokens=256_000)))))
        assert is_clear(exploding_gradient(run(put(calm, self.exploded(3e3, clip_action="capped rows")))))
        assert is_clear(exploding_gradient(run(put(calm, self.exploded(3e3, outcome=StepOutcome.SKIPPED_BY_SCALER)))))
        early = replace(self.exploded(3e3), number=10)
        assert is_clear(exploding_gradient(run(put(calm, early))))

    def test_what_another_check_explains(self) -> None:
        for lost in (zeroed(80), crushed(80)):
            of_table = replace(lost, outliers=self.outlier(1e11, name="embed.weight"))
            assert is_clear(exploding_gradient(run(put(healthy(100), of_table))))

    def test_exploding_that_lasts(self) -> None:
        lasting = [replace(s, norm=20.0, outliers=self.outlier(20.0)) for s in healthy(16, start=60)]
        (one,) = found(exploding_gradient(run(put(healthy(100), *lasting))))
        assert "of the last 16 steps" in one.message
        assert is_clear(exploding_gradient(run(put(healthy(100), *lasting[:7]))))

    def test_vanishing(self) -> None:
        gone = [replace(s, outliers=self.outlier(1e-9)) for s in healthy(16, start=60)]
        (one,) = found(vanishing_gradient(run(put(healthy(100), *gone))))
        assert (one.where.parameter, one.where.step) == ("layers.3.w", 71)
        assert is_clear(vanishing_gradient(run(put(healthy(100), *gone[:11]))))
        assert is_clear(vanishing_gradient(run(put(healthy(100), *every(gone, outliers=self.outlier(2e-8))))))
        assert is_clear(vanishing_gradient(run(put(healthy(100), *every(gone, norm=1e-7))))), "all of it shrinks: converged"
        assert is_clear(vanishing_gradient(run(put(healthy(100), *every(gone, outliers=self.outlier(0.0))))))


def test_a_window_never_tells_what_the_whole_record_does_not() -> None:
    """Every window of a long record whose steps went wrong in many ways: the same steps, whichever window they are seen in."""
    steps = healthy(1408, seed=3)
    steps = put(
        steps, *(crushed(n, 10.0 ** (3 + n % 7)) for n in range(20, 1400, 37)), *(zeroed(n) for n in range(33, 1400, 111))
    )
    steps = [replace(s, loss=9.0, norm=40.0) if 500 <= s.number < 540 else s for s in steps]
    steps = [replace(s, loss=2.5139048099517822) if 700 <= s.number < 980 else s for s in steps]
    steps = [replace(s, moved=0.0) if 900 <= s.number < 1200 else s for s in steps]
    steps = [
        replace(s, outliers=(TensorOutlier(parameter="w", norm=1e4, typical=1.0),), norm=3e4) if s.number in (400, 1001) else s
        for s in steps
    ]
    whole = run(steps)
    for check in (loss_spike, flat_loss, oscillating_loss, exploding_gradient, unchanged_weights):
        all_of = places(check, whole)
        assert all_of or check is oscillating_loss
        seen = set()
        for stop in range(32, 1409, 32):
            part = places(check, window(whole, max(0, stop - 512), stop))
            assert part <= all_of, (check.name, stop, part - all_of)
            seen |= part
        assert seen == all_of, check.name


def test_a_window_tells_every_crushed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ghoststep.checks.steps.crushed_step.MOST_ROWS", 10_000)
    numbers = range(5, 1400, 23)
    steps = put(healthy(1408), *(crushed(n, s, rows=(row(n, s),)) for n in numbers for s in [10.0 ** (3 + n % 7 / 2)]))
    whole = run(steps)
    all_of = places(crushed_step, whole)
    assert 20 < len(all_of) < len(numbers), "some are near misses"
    seen = set()
    for stop in range(32, 1409, 32):
        part = places(crushed_step, window(whole, max(0, stop - 512), stop))
        assert part <= all_of
        seen |= part
    assert seen == all_of


def test_a_window_without_history_is_not_judged_as_a_beginning() -> None:
    """What is usual in this run would be crushed in the first steps of another."""
    own = [
        replace(s, norm=1e6, tables_norm=1e6, trunk_norm=10.0, norm_after=1.0, trunk_norm_after=1e-5, rows=(row(5, 1e6),))
        for s in healthy(1000, start=21)
    ]
    whole = run([*healthy(20), *own])
    assert found(crushed_step(whole))[0].where.step == 21
    for start in range(300, 500, 50):
        assert is_clear(crushed_step(window(whole, start, start + 512)))


def places(check: Any, of: RunRecord) -> set[int | None]:
    said = check(ABSENT, ABSENT, of) if check is unchanged_weights else check(of)
    return {f.where.step for f in getattr(said, "findings", ())}
