"""A loss that diverges at the beginning, one step far above all others, and steps of which nothing is learned: synthetic records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ghoststep.checks.steps.empty_step import empty_step
from ghoststep.checks.steps.loss_spike import loss_spike
from ghoststep.evidence.steps import Gap, RunRecord, Step, StepOutcome
from ghoststep.finding import Finding, Severity
from ghoststep.registry import Answer, Clear, NotApplicable, Unknown
from tests.checks.run_builders import every, healthy, put, record, row, run, skipped, step, window, zeroed
from tests.checks.test_run_checks_lost import found, is_clear


def diverged(
    *, update: int = 1, count: int = 40, height: float = 20.0, lasts: int = 40, norm: float = 30.0, **of_update: Any
) -> list[Step]:
    """One update moves the weights by half of their norm; from the next step on the loss is high."""
    steps = every(healthy(count), moved=0.01)
    steps[update - 1] = replace(steps[update - 1], **{"moved": 0.5, **of_update})
    high = [replace(s, loss=height + 0.1 * (s.number % 7), norm=norm) for s in steps[update : update + lasts]]
    return put(steps, *high)


class TestStart:
    @pytest.mark.parametrize("update", [1, 2, 10, 50])
    def test_the_update_and_the_first_step_are_named(self, update: int) -> None:
        (one,) = found(loss_spike(run(diverged(update=update, count=100, lasts=60))))
        assert (one.where.step, one.where.rank, one.severity) == (update + 1, 0, None)
        assert loss_spike.severity is Severity.WARNING
        assert f"the update of step {update} changed the weights by 0.5 times their norm" in one.message
        assert "learning rate of 0.001" in one.message

    def test_it_is_known_after_seventeen_steps(self) -> None:
        steps = diverged()
        assert len(found(loss_spike(run(steps[:20])))) == 1
        assert isinstance(loss_spike(run(steps[:19])), Unknown)
        late = diverged(update=6)
        assert is_clear(loss_spike(run(late[:21])))
        assert found(loss_spike(run(late[:22])))[0].where.step == 7

    @pytest.mark.parametrize(
        "change",
        [
            {"lasts": 15},  # a bounce that came back
            {"height": 5.5},  # under twice the loss before
            {"norm": 2.0},  # harder texts
            {"moved": 0.19},  # a value loss or a KL term that grows
            {"lasts": 0},
        ],
    )
    def test_near_misses(self, change: dict[str, Any]) -> None:
        assert is_clear(loss_spike(run(diverged(**change))))

    def test_other_look_alikes(self) -> None:
        steps = diverged()
        longer = [s if s.number == 1 else replace(s, num_tokens=512) for s in steps]
        assert is_clear(loss_spike(run(longer))), "a summed loss over longer texts"
        assert is_clear(loss_spike(run(put(steps, replace(steps[0], loss=0.05))))), "it started near 0"
        assert is_clear(loss_spike(run(put(steps, replace(steps[0], loss=-0.5)))))
        dip = replace(steps[9], loss=5.0)
        assert is_clear(loss_spike(run(put(steps[:25], dip)))), "one of the sixteen is as low as any"
        assert is_clear(loss_spike(run(put(steps[:25], replace(dip, loss=math.nan)))))
        later = run(diverged(update=10, count=60))
        assert len(found(loss_spike(window(later, 0, 60)))) == 1
        assert is_clear(loss_spike(window(later, 5, 60))), "a window that does not hold the beginning"

    def test_after_a_gap_it_is_a_beginning_too(self) -> None:
        steps = [replace(s, number=s.number + 500) for s in diverged()]
        whole = run(record([*healthy(100), *steps], gaps=[Gap(after=100, reason="resumed")]))
        assert [f.where.step for f in found(loss_spike(whole))] == [502]

    def test_unseen_movement_leaves_the_beginning_open(self) -> None:
        blind = every(diverged(), moved=None)
        said = loss_spike(run(blind))
        assert isinstance(said, Unknown)
        assert "by how much the weights moved" in said.reason
        longer = loss_spike(run(every(healthy(100), moved=None)))
        assert isinstance(longer, Clear)
        assert "first 64 steps is not judged" in (longer.reason or "")

    def test_a_clear_says_how_far_it_saw(self) -> None:
        short, long = (loss_spike(run(healthy(n))) for n in (40, 100))
        assert isinstance(short, Clear)
        assert isinstance(long, Clear)
        assert short.power is not None
        assert long.power is not None
        assert (short.power.smallest_detectable, long.power.smallest_detectable) == (3.0, 2.0)
        assert "four steps in a row" in long.power.quantity
        assert "only such a one was looked for" in (short.reason or "")

    @pytest.mark.parametrize("update", [1, 30, 45, 55, 60, 63, 64, 66, 80])
    @pytest.mark.parametrize("growth", [1.3, 3.0])
    def test_one_divergence_is_told_once_live_and_in_the_record(self, update: int, growth: float) -> None:
        """Around step 64 both rules apply: one loss that grows on and on."""
        steps = diverged(update=update, count=120, lasts=150)
        steps = [replace(s, loss=(s.loss or 0) * growth ** max(0, s.number - update - 2)) for s in steps]
        whole = run(steps)
        told = messages(loss_spike(whole))
        assert len(told) == 1
        seen: list[str] = []
        for stop in range(4, 121, 4):
            seen += [m for m in messages(loss_spike(window(whole, 0, stop))) if m not in seen]
        assert seen == told


class TestSingle:
    def one(self, at: int = 121, lasts: int = 1, loss: float = 200.0, count: int = 200, **more: Any) -> list[Step]:
        steps = healthy(count)
        return put(steps, *(replace(s, loss=loss, norm=80.0, **more) for s in steps[at - 1 : at - 1 + lasts]))

    @pytest.mark.parametrize("lasts", [1, 2, 3])
    def test_a_note(self, lasts: int) -> None:
        (note,) = found(loss_spike(run(self.one(lasts=lasts))))
        assert (note.where.step, note.severity) == (121, Severity.NOTE)
        assert "the loss of step 121 is 200" in note.message
        assert "gradient norm is 80" in note.message
        assert "--step 121" in note.message

    def test_four_are_a_jump(self) -> None:
        (jump,) = found(loss_spike(run(self.one(lasts=4))))
        assert jump.severity is None

    def test_each_is_told_and_not_before_it_is_over(self) -> None:
        steps = put(self.one(), replace(healthy(200)[149], loss=2e4, norm=80.0))
        assert [f.where.step for f in found(loss_spike(run(steps)))] == [121, 150]
        assert is_clear(loss_spike(run(steps[:121])))
        assert len(found(loss_spike(run(steps[:122])))) == 1

    def test_near_misses(self) -> None:
        top = max(s.loss or 0 for s in healthy(120))
        assert is_clear(loss_spike(run(self.one(loss=9.9 * top))))
        assert len(found(loss_spike(run(self.one(loss=10.1 * top))))) == 1
        assert is_clear(loss_spike(run(self.one(at=60)))), "too little history"
        assert is_clear(loss_spike(run(self.one(num_tokens=512)))), "a summed loss"
        assert is_clear(loss_spike(run(self.one(loss=math.inf))))
        small = [replace(s, loss=1e-4 * (s.loss or 0)) for s in self.one()]
        assert is_clear(loss_spike(run(small))), "losses near 0"
        nan_after = put(self.one(), *every(healthy(3, start=122), loss=math.nan))
        assert is_clear(loss_spike(run(nan_after))), "what ends in NaN is told elsewhere"

    def test_windows_agree_with_the_record(self) -> None:
        steps = put(self.one(count=1000, at=400), *self.one(count=1000, at=800, lasts=3)[799:802])
        whole = run(steps)
        told = messages(loss_spike(whole))
        assert len(told) == 2
        seen: set[str] = set()
        for stop in range(32, 1001, 16):
            seen |= set(messages(loss_spike(window(whole, max(0, stop - 512), stop))))
        assert {m.split(",")[0] for m in seen} == {m.split(",")[0] for m in told}


def test_a_policy_loss_has_no_level() -> None:
    steps = [replace(s, loss=(-1.0) ** s.number) for s in healthy(200)]
    assert isinstance(loss_spike(run(steps)), NotApplicable)
    assert is_clear(loss_spike(run(put(healthy(200), *steps[100:150]))))


def empty(number: int, **more: Any) -> Step:
    """A batch that trains nothing."""
    nothing: dict[str, Any] = {
        "loss": 0.0, "norm": 0.0, "tables_norm": 0.0, "trunk_norm": 0.0, "norm_after": 0.0, "trunk_norm_after": 0.0,
        "num_zero_before": 12, "num_zero_after": 12, "rows": (row(gradient_norm=0.0),),
    }  # fmt: skip
    return step(number, **{**nothing, **more})


def absent(number: int, **more: Any) -> Step:
    """No parameter has a gradient."""
    nothing: dict[str, Any] = {
        "num_gradients": 0, "num_zero_before": 0, "num_zero_after": 0, "norm": None, "tables_norm": None, "trunk_norm": None,
        "norm_after": None, "trunk_norm_after": None, "rows": (), "moved": 0.0,
    }  # fmt: skip
    return step(number, **{**nothing, **more})


class TestEmpty:
    def note(self, of: RunRecord) -> Finding:
        (one,) = found(empty_step(of))
        return one

    def test_one_note_for_all(self) -> None:
        one = self.note(run(put(healthy(60), *(empty(n) for n in (6, 18, 30, 42, 54)))))
        assert empty_step.severity is Severity.NOTE
        assert one.severity in (None, Severity.NOTE)
        assert (one.where.step, one.measured and one.measured.value) == (6, 5)
        assert "5 steps of 60 (steps 6, 18, 30, 42, 54)" in one.message
        assert "no label was left" in one.message
        assert "all rewards of a group were equal" in one.message
        assert "1,280 tokens" in one.message

    def test_many_are_not_listed(self) -> None:
        one = self.note(run(put(healthy(60), *(empty(n) for n in range(1, 60, 2)))))
        assert "(steps 1, 3, 5, 7, 9, 11, 13, 15, ...)" in one.message

    def test_another_loss_is_another_cause(self) -> None:
        one = self.note(run(put(healthy(60), empty(6, loss=-0.0), empty(9, loss=0.7))))
        assert "loss 0 to 0.7" in one.message
        assert "no label was left" not in one.message

    def test_what_was_cleared_after_backward_is_kept_apart(self) -> None:
        cleared = empty(9, loss=2.0, rows=(row(gradient_norm=0.05),))
        both = found(empty_step(run(put(healthy(60), empty(6), cleared))))
        assert [f.where.step for f in both] == [6, 9]
        assert "zero_grad between backward and clipping" in both[1].message

    @pytest.mark.parametrize(
        "other",
        [
            zeroed(6),  # overflow and clipping
            empty(6, num_zero_before=11),
            absent(6, moved=0.01),  # the optimizer had something all the same (gradients that are gone before backward ends)
            absent(6, norm_after=1.0),
            absent(6, outcome=StepOutcome.SKIPPED_BY_SCALER),
            empty(6, loss=math.nan),
            skipped(6, 4.0),
            empty(6, outcome=StepOutcome.SKIPPED_BY_SCALER),
        ],
    )
    def test_what_others_tell(self, other: Step) -> None:
        assert is_clear(empty_step(run(put(healthy(60), other))))

    def test_steps_without_any_gradient_are_a_note_of_their_own(self) -> None:
        both = found(empty_step(run(put(healthy(60), empty(6), absent(9), absent(11)))))
        assert [f.where.step for f in both] == [6, 9]
        assert "not one parameter had a gradient in 2 steps of 60 (steps 9, 11)" in both[1].message

    def test_gradients_that_arrived_are_more_than_a_note_where_they_are_many(self) -> None:
        lost = [empty(n, loss=2.0, rows=(row(gradient_norm=0.05),)) for n in range(1, 100, 2)]
        for count, severity in ((7, None), (9, None), (10, Severity.WARNING), (49, Severity.WARNING), (50, Severity.ERROR)):
            (one,) = found(empty_step(run(put(healthy(100), *lost[:count]))))
            assert one.severity is severity, count

    def test_backwards_that_no_step_used(self) -> None:
        steps = healthy(60)
        one = self.note(run(put(steps, replace(steps[6], num_dropped=1), replace(steps[8], num_dropped=3))))
        assert (
            "the gradients of 4 backwards were set to None before any step used them (before steps 7, 9; 60 steps"
            in one.message
        )
        assert found(empty_step(run(every(steps, num_dropped=3))))
        assert is_clear(empty_step(run(every(steps, num_dropped=1)))), "sharpness-aware"

    def test_many_in_a_row_are_a_warning(self) -> None:
        steps = put(healthy(200), *(empty(n) for n in range(62, 126)))
        note, warning = found(empty_step(run(steps)))
        assert (note.where.step, note.severity) == (62, None)
        assert (warning.where.step, warning.severity) == (125, Severity.WARNING)
        assert "in 64 steps in a row, from step 62 on" in warning.message
        assert len(found(empty_step(run(steps[:124])))) == 1
        assert len(found(empty_step(run(put(steps, *healthy(1, start=80)))))) == 1

    def test_a_gradient_on_another_rank_is_one(self) -> None:
        here, there = put(healthy(60), empty(6), empty(9)), put(healthy(60), empty(9))
        assert self.note(run(here, there)).where.step == 9

    def test_unseen(self) -> None:
        blind: Sequence[Step] = every(healthy(60), norm=None)
        assert isinstance(empty_step(run(blind)), Unknown)
        assert isinstance(empty_step(run([])), Unknown)


def messages(said: Answer) -> list[str]:
    return [f.message for f in getattr(said, "findings", ())]
