"""Two gloo processes under DDP and FSDP2: the rank that fed the token is named, and a killed rank's record can be read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ghoststep
from ghoststep.finding import Outcome
from tests.local_hub import need_loopback
from tests.watch.ranks_worker import BAD_STEPS, GUILTY, PLACE

WORKER = Path(__file__).with_name("ranks_worker.py")
SECONDS = 120


def started(kind: str, folder: Path, num_steps: int) -> list[subprocess.Popen[str]]:
    need_loopback()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), kind, str(rank), str(folder), str(num_steps)],
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What both said on stderr; nothing is left running."""
    try:
        return [p.communicate(timeout=SECONDS)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_guilty_rank_is_named(kind: str, tmp_path: Path) -> None:
    processes = started(kind, tmp_path, 16)
    said = ended(processes)
    assert [p.returncode for p in processes] == [0, 0], said
    report = ghoststep.check(tmp_path / "run")
    errors = [v.name for v in report.verdicts if v.outcome is Outcome.FOUND]
    assert errors == ["zeroed-step"], [f.message for v in report.verdicts for f in v.findings]
    assert report.verdict("gradients-not-cleared").outcome is Outcome.CLEAR
    (finding,) = report.verdict("zeroed-step").findings
    where = finding.where
    assert (where.rank, where.step, where.token_id, where.table_row) == (1, BAD_STEPS[0], GUILTY, GUILTY)
    assert (where.example, where.position) == (1, PLACE)
    assert where.parameter == "backbone.embeddings.weight"  # without what DDP puts in front
    assert "2 steps" in finding.message
    assert "1e-30" in finding.message or "e-30" in finding.message
    assert "rank 1" in finding.message
    # Live, each rank sees its own gradients only. Under FSDP2 the row's shard may lie on the other rank; nobody accuses rank 0.
    assert "GS401 zeroed-step" in said[0]
    assert "position 0" not in said[0]
    assert ("position 8" in said[1]) == (kind == "ddp")


def test_a_killed_rank_leaves_its_record(tmp_path: Path) -> None:
    processes = started("ddp", tmp_path, 100_000)
    try:
        deadline = time.monotonic() + SECONDS
        while not all((tmp_path / f"started-{r}").exists() for r in range(2)):
            assert time.monotonic() < deadline
            assert all(p.poll() is None for p in processes)
            time.sleep(0.02)
        time.sleep(0.5)
        processes[1].kill()
        processes[1].wait(timeout=SECONDS)
        time.sleep(0.3)
    finally:
        for p in processes:
            p.kill()
            p.communicate(timeout=SECONDS)
    report = ghoststep.check(tmp_path / "run")
    (finding,) = report.verdict("zeroed-step").findings
    assert (finding.where.rank, finding.where.step) == (1, BAD_STEPS[0])
    (subject,) = report.subjects
    assert subject.facts["ranks"] == 2
