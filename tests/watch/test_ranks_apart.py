"""GS422 on real runs of two gloo processes: ranks that never reduce are found, every healthy way to reduce is clear."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ghoststep
from ghoststep.finding import Outcome
from tests.local_hub import need_loopback

WORKER = Path(__file__).with_name("apart_worker.py")
ROOT = WORKER.parents[2]
NUM_STEPS, SECONDS = 24, 120


def trained(kind: str, folder: Path) -> Path:
    need_loopback()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), kind, str(rank), str(folder), str(NUM_STEPS)],
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=SECONDS)[1] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [p.returncode for p in ranks] == [0, 0], said
    assert "GS422" not in "".join(said), "one rank alone says nothing"
    return folder / "run"


@pytest.mark.parametrize("kind", ["inside", "inside+clipped", "never-synced+accumulated+clipped"])
def test_nothing_is_reduced(kind: str, tmp_path: Path) -> None:
    report = ghoststep.check(trained(kind, tmp_path))
    assert [v.name for v in report.verdicts if v.outcome is Outcome.FOUND] == ["ranks-apart"]
    (finding,) = report.verdict("ranks-apart").findings
    assert (finding.where.step, finding.where.rank) == (1, 1)


@pytest.mark.parametrize(
    "kind", ["ddp", "ddp+accumulated+clipped", "ddp+uneven+clipped", "ddp+fp16-hook", "inside+by-hand+clipped", "inside+same"]
)
def test_all_ranks_step_alike(kind: str, tmp_path: Path) -> None:
    report = ghoststep.check(trained(kind, tmp_path))
    assert [f.message for v in report.verdicts for f in v.findings] == []
    verdict = report.verdict("ranks-apart")
    assert (verdict.outcome, verdict.reason) == (Outcome.CLEAR, f"{NUM_STEPS} steps of 2 ranks compared")


def test_a_watch_that_begins_later_on_one_rank(tmp_path: Path) -> None:
    verdict = ghoststep.check(trained("late+clipped", tmp_path)).verdict("ranks-apart")
    assert verdict.outcome is Outcome.UNKNOWN
    assert verdict.reason == "rank 1 numbers its steps 3 earlier than rank 0"
