"""Judging steps at each flush: every cause is told once, and found stays found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ghoststep.evidence.steps import Step, StepRow
from ghoststep.finding import Outcome, Severity
from ghoststep.registry import load
from ghoststep.watching.judge import MAX_RAISES, WINDOW, Alarm, Judge, run_checks

from . import watch_checks as own


def lost(number: int, row: int = 7) -> Step:
    rows = (StepRow(table="wte", token_id=row, micro_batch=0, example=0, position=number, gradient_norm=1e28),)
    return replace(own.healthy(number), num_zero_after=4, norm=math.inf, rows=rows)


class Live:
    """Feeds steps to a judge as the watch does: flush by flush, with a window."""

    def __init__(self, judge: Judge, flush: int = 32) -> None:
        self.judge, self.flush = judge, flush
        self.steps: list[Step] = []
        self.alarms: list[Alarm] = []

    def feed(self, steps: Sequence[Step], broken: tuple[str, ...] = ()) -> list[Alarm]:
        new: list[Alarm] = []
        for start in range(0, len(steps), self.flush):
            part = steps[start : start + self.flush]
            self.steps = [*self.steps, *part][-WINDOW:]
            new += self.judge.look(part, own.record(self.steps, broken))
        self.alarms += new
        return new


def run(first: int, last: int, **bad: Step) -> list[Step]:
    special = {s.number: s for s in bad.values()}
    return [special.get(n, own.healthy(n)) for n in range(first, last + 1)]


def test_only_checks_that_need_a_run_alone_are_asked() -> None:
    assert [c.code for c in run_checks(own.ALL)] == ["GS401", "GS404", "GS405", "GS408", "GS410", "GS411"]
    built_in = {c.code for c in run_checks(load(with_instruments=False).checks)}
    assert "GS101" not in built_in
    assert not any(c.startswith("GS9") for c in built_in)


def test_a_healthy_run_is_silent_and_clear() -> None:
    live = Live(Judge(own.ALL[:-2]))
    assert live.feed(run(1, 2000)) == []
    assert {v.name: v.outcome for v in live.judge.verdicts()} == dict.fromkeys(
        ("zeroed-step", "nan-loss", "nonfinite-gradient", "spiking-loss", "needs-history"), Outcome.CLEAR
    )


def test_a_growing_count_is_one_alarm_and_the_latest_text() -> None:
    live = Live(Judge(own.ALL[:2]))
    live.feed([lost(n) if n % 10 == 0 else own.healthy(n) for n in range(1, 301)])
    assert [(a.code, a.name, a.severity, a.step, a.is_first) for a in live.alarms] == [
        ("GS401", "zeroed-step", Severity.ERROR, 10, True)
    ]
    assert live.alarms[0].finding.message == "row 7: 3 steps"
    verdict = live.judge.verdicts()[0]
    assert [f.message for f in verdict.findings] == ["row 7: 30 steps"]


def test_another_row_is_another_alarm() -> None:
    live = Live(Judge(own.ALL[:2]))
    live.feed(run(1, 100, a=lost(20), b=lost(90, row=8)))
    assert [a.finding.where.table_row for a in live.alarms] == [7, 8]


def test_a_window_that_slides_neither_repeats_nor_forgets() -> None:
    """One finding a cause, whose first step leaves the window: neither a new alarm, nor a smaller count at the end."""
    live = Live(Judge(own.ALL[:2]))
    nan = [own.healthy(n, math.nan) for n in range(50, 3001)]
    live.feed([*run(1, 49), *nan])
    live.feed([lost(n) for n in range(3001, 3010)])
    live.feed(run(3010, 4500))
    assert [(a.code, a.step) for a in live.alarms] == [("GS404", 50), ("GS401", 3001)]
    zeroed, hidden = live.judge.verdicts()
    assert [f.message for f in zeroed.findings] == ["row 7: 9 steps"]
    assert len(hidden.findings) == 1
    assert hidden.findings[0].where.step == 50
    assert "the last 512 steps" in (hidden.reason or "")


def test_an_old_row_that_returns_after_the_window_keeps_its_count() -> None:
    live = Live(Judge(own.ALL[:1]))
    live.feed([lost(n) if n in (5, 6, 7, 900) else own.healthy(n) for n in range(1, 1001)])
    assert len(live.alarms) == 1
    verdict = live.judge.verdicts()[0]
    assert verdict.findings[0].message == "row 7: 3 steps"
    assert "counts end" in (verdict.reason or "")


def test_events_at_no_place_are_told_one_by_one() -> None:
    live = Live(Judge([own.spiking_loss]))
    live.feed(
        run(1, 1200, a=own.healthy(40, 500.0), b=own.healthy(41, 500.0), c=own.healthy(300, 900.0), d=own.healthy(1190, 1e3))
    )
    assert [a.step for a in live.alarms] == [40, 41, 300, 1190]
    assert len(live.judge.verdicts()[0].findings) == 4


def test_a_second_episode_within_the_window_is_told() -> None:
    live = Live(Judge([own.nan_loss]))
    live.feed([own.healthy(n, math.nan if n in (10, 700) else 2.0) for n in range(1, 800)])
    assert [a.step for a in live.alarms] == [10, 700]


def test_a_symptom_is_told_under_its_cause() -> None:
    live = Live(Judge((own.zeroed_step, own.spiking_loss)))
    live.feed(run(1, 32, a=replace(lost(20), loss=500.0)))
    assert [a.code for a in live.alarms] == ["GS401"]
    cause, symptom = live.judge.verdicts()
    assert [x.code for x in cause.findings[0].symptoms] == ["GS408"]
    assert (symptom.outcome, symptom.findings) == (Outcome.FOUND, ())
    live = Live(Judge((own.zeroed_step, own.spiking_loss)))
    alone = live.feed(run(1, 32, a=own.healthy(20, 500.0)))
    assert [a.code for a in alone] == ["GS408"]


def test_a_check_that_raises_is_broken_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    live = Live(Judge([own.raising, own.zeroed_step]))
    live.feed(run(1, 320, a=lost(300)))
    assert [a.code for a in live.alarms] == ["GS401"]
    broken = live.judge.verdicts()[0]
    assert broken.outcome is Outcome.BROKEN
    assert "a defect" in (broken.reason or "")
    assert f"after {MAX_RAISES} times" in (broken.reason or "")
    assert sum("broke; training goes on" in r.message for r in caplog.records) == 1


def test_a_hook_of_ours_that_failed_leaves_nothing_clear() -> None:
    live = Live(Judge(own.ALL[:2]))
    live.feed(run(1, 64, a=lost(20)))
    live.feed(run(65, 100), broken=("embedding: RuntimeError: no",))
    found, other = live.judge.verdicts()
    assert found.outcome is Outcome.FOUND
    assert "embedding: RuntimeError" in (found.reason or "")
    assert other.outcome is Outcome.BROKEN
    assert other.power is None


def test_without_a_step_nothing_is_clear() -> None:
    judge = Judge(own.ALL[:2])
    assert judge.look([], own.record([])) == []
    assert {v.outcome for v in judge.verdicts()} == {Outcome.UNKNOWN}


def test_unknown_keeps_its_reason_and_what_was_clear_before() -> None:
    judge = Judge([own.needs_history])
    judge.look([own.healthy(1)], own.record([own.healthy(1)]))
    assert judge.verdicts()[0].reason == "fewer than 20 steps"
    many = run(2, 40)
    judge.look(many, own.record(many))
    judge.restart()
    judge.look([own.healthy(41)], own.record([own.healthy(41)]))
    assert judge.verdicts()[0].outcome is Outcome.UNKNOWN
    assert judge.verdicts()[0].reason == "clear until step 40; after that: fewer than 20 steps"


def test_after_a_rollback_the_same_cause_is_told_again() -> None:
    live = Live(Judge(own.ALL[:1]))
    live.feed(run(1, 32, a=lost(20)))
    live.judge.restart()
    live.steps = []
    live.feed(run(33, 64, a=lost(40)))
    assert [(a.step, a.is_first) for a in live.alarms] == [(20, True), (40, False)]


def test_the_whole_record_counts_at_the_end() -> None:
    live = Live(Judge(own.ALL[:1]))
    every = [lost(n) if n % 100 == 0 else own.healthy(n) for n in range(1, 2001)]
    live.feed(every)
    final = live.judge.verdicts(own.record(every))[0]
    assert [f.message for f in final.findings] == ["row 7: 20 steps"]
    assert final.reason is None


def test_memory_is_bounded() -> None:
    live = Live(Judge(own.ALL[:1]))
    live.feed([lost(n, row=n) for n in range(1, 1001)])
    verdict = live.judge.verdicts()[0]
    assert len(verdict.findings) == len(live.alarms) == 256
    assert "further places" in (verdict.reason or "")
