"""Trainings that lack nothing: a hundred and more steps without an error or a warning, live and in the final report."""

from __future__ import annotations

from pathlib import Path

import pytest

from ghoststep.finding import Outcome, Severity
from tests.watch.healthy_loops import HEALTHY
from tests.watch.loops import Watch, language_model, run, steps_of, watch
from tests.watch.more_loops import spiking

NUM_STEPS = 110


def alarms(w: Watch) -> list[str]:
    """Errors and warnings, told while training or in the report."""
    told = [
        f"live, step {a.step}: {a.code} {a.name}: {a.finding.message}"
        for a in w.flusher.alarms
        if a.severity is not Severity.NOTE
    ]
    report = w.report()
    for v in report.verdicts:
        if v.outcome is Outcome.BROKEN:
            told.append(f"{v.code} {v.name} broke: {v.reason}")
        told += [
            f"report: {v.code} {v.name}: {f.message}" for f in v.findings if (f.severity or v.severity) is not Severity.NOTE
        ]
    assert report.exit_code == 0 or told
    return told


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy(name: str, tmp_path: Path) -> None:
    ran = run(HEALTHY[name], NUM_STEPS, tmp_path, flush_steps=16)
    for w in ran.watches:
        assert len(steps_of(w)) == NUM_STEPS
        assert alarms(w) == []


def test_resumed(tmp_path: Path) -> None:
    loop = language_model()()
    for part in range(3):
        with watch(loop.models[0], loop.optimizers[0], run_dir=tmp_path) as w:
            for i in range(50):
                loop.step(50 * part + i)
        assert steps_of(w)[0].number == 50 * part + 1
        assert alarms(w) == []


def test_lost_steps_are_told_by_the_same_measure() -> None:
    told = alarms(run(spiking("torch"), 20, flush_steps=16).watches[0])
    assert any(line.startswith("live, step 5: GS401") for line in told)
    assert any(line.startswith("report: GS401") for line in told)
