"""Trainer, Lightning and Accelerate: the lost steps are found with their cause, healthy runs are silent, and no bit changes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from ghoststep.errors import UsageError
from ghoststep.finding import Outcome, Report, Severity
from ghoststep.watching.policy import LostStepError
from tests.integrations.runs import POSITION, RUNS, TOKEN, Ran, Run, batches, healthy, poisoned

torch.set_num_threads(1)

STEPS = max(30, int(os.environ.get("GHOSTSTEP_IDENTITY_STEPS", "0")))


def bad(report: Report | None) -> list[str]:
    """Every verdict that says anything but clear, not-applicable or a note. No hook of ours may have failed."""
    assert report is not None
    assert "broken" not in report.subjects[0].facts, report.subjects[0].facts["broken"]
    quiet = (Outcome.CLEAR, Outcome.NOT_APPLICABLE, Outcome.UNKNOWN)
    return [
        f"{v.code} {v.name}: {v.outcome.value} {v.reason} {[f.message for f in v.findings]}"
        for v in report.verdicts
        if v.outcome not in quiet and not (v.outcome is Outcome.FOUND and v.severity is Severity.NOTE)
    ]


def the_lost_step(ran: Ran, *, step: int, micro_batch: int = 0) -> None:
    assert ran.report is not None
    verdict = ran.report.verdict("zeroed-step")
    assert verdict.outcome is Outcome.FOUND, verdict
    (finding,) = verdict.findings
    where = finding.where
    assert (where.token_id, where.table_row, where.position, where.example) == (TOKEN, TOKEN, POSITION, 1)
    assert (where.step, where.micro_batch) == (step, micro_batch)
    assert "table row 17" in finding.message
    assert "e-30" in finding.message  # the row's norm: 32 entries of 1e-30
    assert [line.split()[0] for line in bad(ran.report)] == ["GS401"]


@RUNS
def test_the_lost_step_is_found_where_the_trainers_log_shows_nothing(run: Run, tmp_path: Path) -> None:
    ran = run(poisoned(), batches(10, guilty=[2, 5]), tmp_path)
    assert ran.steps == 10
    the_lost_step(ran, step=3)
    assert all(math.isfinite(value) for line in ran.log for value in line.values())
    assert all(loss < 6 for loss in ran.losses)


@RUNS
def test_one_bad_micro_batch_of_four(run: Run, tmp_path: Path) -> None:
    ran = run(poisoned(), batches(12, guilty=[6]), tmp_path, accumulation=4)
    assert ran.steps == 3
    the_lost_step(ran, step=2, micro_batch=2)


@RUNS
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_healthy_run_is_silent_and_ends_with_the_same_bits(run: Run, accumulation: int, tmp_path: Path) -> None:
    plain, watched = healthy(), healthy()
    start = [p.detach().clone() for p in plain.parameters()]
    given = batches(STEPS * accumulation, guilty=[3])  # the token is harmless here
    without = run(plain, given, tmp_path, watched=False, accumulation=accumulation)
    sink = tmp_path / "steps.jsonl"
    ran = run(
        watched, given, tmp_path, accumulation=accumulation, run_dir=tmp_path / "run", sinks=[f"jsonl:{sink}"], flush_steps=7
    )
    assert ran.steps == without.steps == STEPS
    assert not bad(ran.report)
    assert ran.losses == without.losses
    assert len(set(ran.losses)) > 20
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not all(torch.equal(a, b) for a, b in zip(start, plain.parameters(), strict=True))
    lines = [json.loads(line) for line in sink.read_text().splitlines()]
    assert [line["ghoststep/steps/number"] for line in lines] == list(range(1, STEPS + 1))
    assert {line["ghoststep/steps/micro_batches"] for line in lines} == {accumulation}


@RUNS
def test_a_run_with_a_lost_step_keeps_its_bits_too(run: Run, tmp_path: Path) -> None:
    plain, watched = poisoned(), poisoned()
    given = batches(4, guilty=[1])
    without, ran = run(plain, given, tmp_path, watched=False), run(watched, given, tmp_path, run_dir=tmp_path / "run")
    assert ran.losses == without.losses
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    the_lost_step(ran, step=2)


@RUNS
def test_a_policy_stop_ends_the_training(run: Run, tmp_path: Path) -> None:
    ran = run(poisoned(), batches(12, guilty=[1]), tmp_path, policy={"GS401": "stop"}, flush_steps=2)
    assert 2 <= ran.steps <= 6
    the_lost_step(ran, step=2)


@RUNS
def test_a_policy_raise_ends_it_by_an_exception(run: Run, tmp_path: Path) -> None:
    with pytest.raises(LostStepError, match="zeroed-step at step 2"):
        run(poisoned(), batches(12, guilty=[1]), tmp_path, policy={"GS401": "raise"}, flush_steps=2)
    with pytest.raises(LostStepError, match="zeroed-step at step 2"):  # found at the very end only
        run(poisoned(), batches(2, guilty=[1]), tmp_path, policy={"GS401": "raise"}, flush_steps=32)


@RUNS
def test_what_cannot_work_is_refused_before_the_first_step(run: Run, tmp_path: Path) -> None:
    model = healthy()
    start = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UsageError, match="strict=True"):
        run(model, batches(2), tmp_path, policy={"GS401": "skip-step"})
    assert all(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
