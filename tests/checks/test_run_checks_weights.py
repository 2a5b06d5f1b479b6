"""What steps do to weights, judged of small records: gradients not cleared, updates lost in part, gradients that never arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ghoststep.checks.steps.gradients_not_cleared import gradients_not_cleared
from ghoststep.checks.steps.unchanged_weights import unchanged_weights
from ghoststep.evidence.base import Missing
from ghoststep.evidence.steps import Gap, Step, StepOutcome
from ghoststep.evidence.training import OptimizerGroup
from ghoststep.finding import Outcome, Severity
from ghoststep.registry import Answer, NotApplicable, Unknown
from ghoststep.run_folder import decode_steps
from tests.checks.run_builders import every, healthy, put, record, run, step, window
from tests.checks.test_run_checks_lost import found, is_clear

ABSENT = Missing(reason="needs a setup, and none was given", outcome=Outcome.NOT_APPLICABLE, is_absent=True)
SKIPPED = StepOutcome.SKIPPED_BY_SCALER


def group(num_tensors: int, *, lr: float = 1e-3, initial_lr: float | None = None, num_frozen: int = 0) -> OptimizerGroup:
    return OptimizerGroup(
        index=0, optimizer="AdamW", lr=lr, initial_lr=initial_lr, weight_decay=0.0, num_tensors=num_tensors, num_frozen=num_frozen
    )  # fmt: skip


def test_records_of_earlier_versions_are_read() -> None:
    data = msgspec.msgpack.encode([{"number": 3, "ended_at": 1.0}])
    (old,) = decode_steps(data)
    assert (old.kept_gradients, old.stuck) == (None, None)
    (new,) = decode_steps(msgspec.msgpack.encode([step(4, kept_gradients=True, stuck=0.25)]))
    assert (new.kept_gradients, new.stuck) == (True, 0.25)


class TestNotCleared:
    def of(self, steps: Sequence[Step], **facts: Any) -> Answer:
        return gradients_not_cleared(ABSENT, run(steps, **facts))

    def steps(self, count: int) -> list[Step]:
        """The first 30 are cleared, then so many are not."""
        return [*every(healthy(30), kept_gradients=False), *every(healthy(count, start=31), kept_gradients=True)]

    def test_five_steps_and_four(self) -> None:
        (one,) = found(self.of(self.steps(5)))
        assert (one.where.step, one.severity) == (31, None)
        assert "in 5 steps in a row, from step 31 on" in one.message
        assert is_clear(self.of(self.steps(4)))

    @pytest.mark.parametrize(
        "change", [{"outcome": SKIPPED}, {"norm_after": 0.0}, {"norm_after": None}, {"kept_gradients": None}]
    )
    def test_near_misses(self, change: dict[str, Any]) -> None:
        steps = self.steps(5)
        assert is_clear(self.of(put(steps, replace(steps[33], **change))))
        assert is_clear(self.of([*steps[:30], *every(steps[30:], **change)]))

    def test_cleared_every_fourth_step_is_not_called_clear(self) -> None:
        steps = [replace(s, kept_gradients=s.number % 4 != 0) for s in healthy(40)]
        said = self.of(steps)
        assert isinstance(said, Unknown)
        assert "in 30 steps" in said.reason

    def test_unseen_and_absent(self) -> None:
        said = self.of(healthy(30))
        assert isinstance(said, Unknown)
        assert said.reason == "no step shows whether gradients were cleared"
        assert isinstance(self.of(every(healthy(4), kept_gradients=False)), Unknown)
        seen = every(healthy(14), kept_gradients=False)
        assert is_clear(self.of([*seen, *healthy(14, start=15)]))
        assert isinstance(self.of([*seen, *healthy(15, start=15)]), Unknown)
        assert is_clear(self.of([*seen, *every(healthy(60, start=15), outcome=SKIPPED)]))
        assert isinstance(gradients_not_cleared(ABSENT), NotApplicable)


class TestLostUpdates:
    def of(self, steps: Sequence[Step], *, is_live: bool = False, **facts: Any) -> Answer:
        return unchanged_weights(ABSENT, ABSENT, run(steps, is_live=is_live, **facts))

    def steps(self, share: float, count: int = 192) -> list[Step]:
        return [replace(s, stuck=share) if s.number % 64 == 0 else s for s in healthy(count)]

    @pytest.mark.parametrize(("share", "severity"), [(0.5, Severity.WARNING), (0.89, Severity.WARNING), (0.9, Severity.ERROR)])
    def test_shares(self, share: float, severity: Severity) -> None:
        (one,) = found(self.of(self.steps(share)))
        assert (one.where.step, one.severity) == (1, severity)
        assert f"{100 * share:.0f} % kept one and the same value" in one.message

    def test_half_of_them_and_less(self) -> None:
        assert is_clear(self.of(self.steps(0.49)))
        assert found(unchanged_weights(ABSENT, ABSENT, run(self.steps(0.49)), lost_fraction=0.4))

    def test_the_worst_severity_counts(self) -> None:
        steps = self.steps(0.6)
        (one,) = found(self.of(put(steps, replace(steps[127], stuck=0.95))))
        assert (one.where.step, one.severity) == (65, Severity.ERROR)

    @pytest.mark.parametrize("change", [{"lrs": (4e-4,)}, {"lrs": (0.0,)}, {"norm_after": 1e-7}, {"norm_after": 0.0}])
    def test_one_step_of_the_window_off_its_height(self, change: dict[str, Any]) -> None:
        steps = self.steps(0.95, 64)
        assert found(self.of(steps))
        assert is_clear(self.of(put(steps, replace(steps[20], **change))))

    def test_a_warm_up_is_known_by_the_base_rate_and_a_decay_by_its_past(self) -> None:
        slow = every(self.steps(0.95, 64), lrs=(1e-5,))
        assert found(self.of(slow))
        assert is_clear(self.of(slow, groups=(group(3, lr=1e-5, initial_lr=1e-3),)))
        decayed = [
            replace(s, lrs=(1e-5,), stuck=0.95 if s.number == 128 else None) if s.number > 64 else s for s in healthy(128)
        ]
        assert is_clear(self.of(decayed))

    def test_a_skipped_step_is_no_part_of_a_window(self) -> None:
        steps = [replace(s, stuck=0.95 if s.number == 66 else None) for s in healthy(66)]
        assert found(self.of(put(steps, step(9, outcome=SKIPPED), step(10, outcome=SKIPPED))))
        assert is_clear(self.of(put(steps, *(step(n, outcome=SKIPPED) for n in (9, 10, 11)))))

    def test_a_window_that_began_before_the_record(self) -> None:
        assert is_clear(self.of(self.steps(0.95, 64)[10:]))
        whole = run(self.steps(0.95, 640))
        for start in range(0, 640, 64):
            seen = unchanged_weights(ABSENT, ABSENT, window(whole, max(0, start - 448), start + 64))
            assert len(found(seen)) == 1

    def test_a_rounding_that_is_not_known(self) -> None:
        said = self.of(healthy(40), unseen={"stuck": "Own is no optimizer of torch"})
        assert is_clear(said)
        assert "updates lost in part are not seen: Own is" in (said.reason or "")


class TestHardlyMoving:
    def of(self, steps: Sequence[Step], **facts: Any) -> Answer:
        return unchanged_weights(ABSENT, ABSENT, run(steps, **facts))

    def steps(self, count: int, **more: Any) -> list[Step]:
        return [
            *healthy(30),
            *every(healthy(count, start=31), **{"moved": 3e-10, "norm_after": 1e-9, "clip_bound": 1e-9, **more}),
        ]

    def test_sixty_four_steps_and_sixty_three(self) -> None:
        (one,) = found(self.of(self.steps(64)))
        assert (one.where.step, one.severity) == (31, Severity.WARNING)
        assert "at most 3e-10 of their norm a step in 64 steps in a row, from step 31 on" in one.message
        assert "clipping to a norm of 1e-09 left" in one.message
        assert is_clear(self.of(self.steps(63)))

    def test_a_rate_that_is_too_small(self) -> None:
        (one,) = found(self.of(every(healthy(70), moved=5e-8, lrs=(1e-9,))))
        assert "a learning rate of 1e-09 is too small" in one.message

    @pytest.mark.parametrize(
        "more",
        [
            {"moved": 7e-8},
            {"norm": 0.01},  # converged: the norm was 1.25
            {"norm": 0.0, "trunk_norm": 0.0},
            {"trunk_norm": None},  # only rows of a table train: the sample may miss them
            {"lrs": (0.0,), "moved": 1e-9},
            {"moved": None},
            {"outcome": SKIPPED},
        ],
    )
    def test_near_misses(self, more: dict[str, Any]) -> None:
        assert not _messages(self.of(self.steps(80, **more)), "hold")

    def test_a_warm_up_is_known_by_the_base_rate(self) -> None:
        slow = every(healthy(80), moved=1e-9, lrs=(1e-9,))
        assert is_clear(self.of(slow, groups=(group(3, lr=1e-9, initial_lr=1e-3),)))

    def test_a_schedule_that_is_over(self) -> None:
        base = (group(3, lr=1e-3, initial_lr=1e-3),)
        decayed = [replace(s, lrs=(1e-3 * 0.5**s.number,), moved=1e-4 * 0.5**s.number) for s in healthy(160)]
        (one,) = found(self.of(decayed, groups=base))
        assert (one.where.step, one.severity) == (11, Severity.WARNING)
        assert "in 150 of 160 steps, from step 11 on" in one.message
        assert is_clear(self.of(decayed[:127], groups=base))
        assert is_clear(self.of(decayed[20:], groups=base)), "where it began is not known"

    def test_the_end_of_a_schedule_and_a_warm_up(self) -> None:
        count = 400
        cosine = [
            replace(s, lrs=(1e-3 * share,), moved=1e-4 * share)
            for s in healthy(count)
            for share in [0.5 + 0.5 * math.cos(math.pi * s.number / count)]
        ]
        ended = [*cosine, *every(healthy(300, start=count + 1), lrs=(1e-12,), moved=1e-13)]
        assert is_clear(self.of(ended[: count + 60], groups=(group(3, lr=1e-3, initial_lr=1e-3),)))
        rising = [replace(s, lrs=(1e-12 * s.number,), moved=1e-13 * s.number) for s in healthy(300)]
        assert is_clear(self.of(rising, groups=(group(3, lr=1e-3, initial_lr=1e-3),)))


def _messages(said: Answer, word: str) -> list[str]:
    return [f.message for f in getattr(said, "findings", ()) if word in f.message]


class TestNeverArrived:
    def of(self, steps: Sequence[Step], **facts: Any) -> Answer:
        return unchanged_weights(ABSENT, ABSENT, run(steps, **facts))

    def steps(self, count: int, start: int = 1, **more: Any) -> list[Step]:
        nothing: dict[str, Any] = {"norm": None, "norm_after": None, "tables_norm": None, "trunk_norm": None, "loss": None}
        return every(healthy(count, start=start), **{**nothing, "num_gradients": 0, "moved": None, **more})

    def test_twenty_steps_and_nineteen(self) -> None:
        (one,) = found(self.of(self.steps(20)))
        assert (one.where.step, one.severity) == (1, Severity.ERROR)
        assert isinstance(self.of(self.steps(19)), Unknown)
        assert is_clear(self.of([*self.steps(19), *healthy(40, start=20)]))
        assert found(self.of([*self.steps(20), *healthy(40, start=21)]))

    @pytest.mark.parametrize(
        "change", [{"moved": 1e-5}, {"norm_after": 1.0}, {"norm": 1.0}, {"num_gradients": 1}, {"outcome": SKIPPED}]
    )
    def test_look_alikes(self, change: dict[str, Any]) -> None:
        steps = self.steps(30)
        assert not isinstance(self.of(put(steps, replace(steps[10], **change))), type(self.of(steps)))

    def test_later_and_elsewhere(self) -> None:
        part = [*healthy(30), *self.steps(40, 31)]
        assert isinstance(self.of(part), Unknown), "a part of a run in which another model trains"
        assert is_clear(self.of([*part, *healthy(40, start=71)]))
        assert isinstance(self.of(self.steps(40), parallelism="FSDP1"), Unknown)
        later = record(self.steps(40, 101), gaps=[Gap(after=50, reason="not readable")])
        assert found(unchanged_weights(ABSENT, ABSENT, run(later))), "a resumed run begins there"
        assert isinstance(unchanged_weights(ABSENT, ABSENT, window(run(self.steps(80)), 20, 80)), Unknown)

    def test_a_joint_optimizer(self) -> None:
        names = tuple("abcd")
        for groups, severity in (
            ((group(4),), Severity.ERROR),
            ((group(6, num_frozen=2),), Severity.ERROR),
            ((group(3), group(1)), Severity.ERROR),
            ((group(4), group(1)), Severity.WARNING),
        ):
            (one,) = found(self.of(self.steps(30), trainable=names, groups=groups))
            assert one.severity is severity
