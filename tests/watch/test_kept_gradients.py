"""GS412 of a run: gradients that nobody clears are found, and every way of clearing them is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

import ghoststep
from ghoststep.finding import Outcome, Severity, Verdict
from tests.watch.clearing_loops import CLEARED, KEPT, UNTOLD
from tests.watch.loops import Watch, run, steps_of

NUM_STEPS = 24


def verdict(w: Watch) -> Verdict:
    return next(v for v in w.report().verdicts if v.code == "GS412")


def flags(w: Watch) -> list[bool | None]:
    return [s.kept_gradients for s in steps_of(w)]


@pytest.mark.parametrize("name", CLEARED)
def test_cleared(name: str) -> None:
    for w in run(CLEARED[name], NUM_STEPS, flush_steps=8).watches:
        assert not w.faults.lines()
        assert True not in flags(w)
        assert False in flags(w)
        assert not any(a.code == "GS412" for a in w.flusher.alarms)
        assert verdict(w).outcome is Outcome.CLEAR


@pytest.mark.parametrize("name", UNTOLD)
def test_neither_found_nor_clear(name: str) -> None:
    (w,) = run(UNTOLD[name], NUM_STEPS, flush_steps=8).watches
    assert not w.faults.lines()
    assert set(flags(w)) == {None}
    assert verdict(w).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str, tmp_path: Path) -> None:
    (w,) = run(KEPT[name], NUM_STEPS, tmp_path, flush_steps=8).watches
    assert not w.faults.lines()
    assert flags(w) == [None] + [True] * (NUM_STEPS - 1)
    (alarm,) = [a for a in w.flusher.alarms if a.code == "GS412"]
    assert (alarm.step, alarm.severity) == (2, Severity.ERROR)
    (finding,) = verdict(w).findings
    assert f"in {NUM_STEPS - 1} steps in a row, from step 2 on" in finding.message
    (again,) = next(v for v in ghoststep.check(tmp_path / "run0", select=["GS412"]).verdicts if v.code == "GS412").findings
    assert again.message == finding.message
