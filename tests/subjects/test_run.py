"""A run folder as a subject: what `ghoststep check RUN` says about good, partial and foreign ones."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path

import pytest
from tests.watch.spool_steps import NAMES, bits, make_facts, make_step, make_steps
from typer.testing import CliRunner

import ghoststep
from ghoststep.cli.main import build_app
from ghoststep.engine import Case
from ghoststep.errors import CannotLook, SubjectError
from ghoststep.evidence.base import Missing
from ghoststep.evidence.rows import InputRows
from ghoststep.evidence.steps import RunFacts, RunRecord, Step
from ghoststep.finding import Outcome
from ghoststep.instruments.run_record import run_record
from ghoststep.registry import load
from ghoststep.run_folder import HEADER, MANIFEST, segments
from ghoststep.subjects import open_subject, run_ranks
from ghoststep.subjects.checkpoint import Checkpoint
from ghoststep.subjects.run import Run, is_run_folder
from ghoststep.watching.spool import Spool


def quiet_step(number: int) -> Step:
    """A healthy step, so that what a report says comes from the files."""
    return dataclasses.replace(
        make_step(number * 30 + 1), number=number, loss=3.0 - number / 1000, num_graph_nodes=None, outliers=(), nonfinite_before=(),
        num_nonfinite_before=0, norm=1.0, norm_after=1.0, tables_norm=0.5, trunk_norm=0.8, trunk_norm_after=0.8, rows=(), moved=1e-4,
    )  # fmt: skip


def build(folder: Path, num_steps: int = 100, ranks: int = 1, *, close: bool = True, **facts: object) -> Path:
    for rank in range(ranks):
        spool = Spool(folder, make_facts(rank, world_size=ranks, **facts))
        for start in range(1, num_steps + 1, 32):
            spool.write([quiet_step(n) for n in range(start, min(start + 32, num_steps + 1))])
        if close:
            spool.close()
        else:
            spool._release()
    return folder


def check(folder: Path) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(("check",)), ["check", str(folder), "--format", "concise"])
    assert result.exception is None or isinstance(result.exception, SystemExit | ghoststep.GhoststepError), result.exception
    said = result.output + (str(result.exception) if result.exception else "")
    return (2 if isinstance(result.exception, ghoststep.GhoststepError) else result.exit_code), said


def test_a_run_folder_is_a_run(tmp_path: Path) -> None:
    folder = build(tmp_path / "run", ranks=2)
    run = open_subject(str(folder))
    assert isinstance(run, Run)
    assert (run.kind, run.name) == ("run", str(folder))
    facts = run.info().facts
    assert facts["model"] == "LlamaForCausalLM"
    assert (facts["ranks"], facts["steps"], facts["ended"]) == (2, "1 to 100", "closed")
    assert "2023-11-14" in str(facts["recorded"])
    assert not {"damaged", "gaps", "read", "ranks_missing"} & set(facts)
    record = run_record.function(run)
    assert [r.facts.rank for r in record.ranks] == [0, 1]
    assert not record.is_live
    assert len(record.ranks[1].steps) == 100


def test_a_healthy_run_passes_and_other_checks_do_not_apply(tmp_path: Path) -> None:
    report = ghoststep.check(build(tmp_path / "run"))
    assert report.exit_code == 0
    assert [v.name for v in report.verdicts if v.outcome in (Outcome.FOUND, Outcome.BROKEN)] == []
    assert [v.code for v in report.verdicts if v.outcome is Outcome.UNKNOWN and not v.code.startswith("GS4")] == []
    assert report.verdict("zeroed-step").outcome is Outcome.CLEAR
    for name in ("near-zero-input-rows", "visible-future", "unshifted-labels", "missing-warm-up", "vocab-size-disagreement"):
        verdict = report.verdict(name)
        assert verdict.outcome is Outcome.NOT_APPLICABLE
        assert "none was given" in (verdict.reason or "")


def test_a_lost_step_in_the_record_is_found(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "run", make_facts())
    steps = [quiet_step(n) for n in range(1, 60)]
    steps[49] = dataclasses.replace(
        steps[49], loss=math.nan, norm=math.nan, num_nonfinite_before=40, nonfinite_before=NAMES[:4], num_nonfinite_after=40
    )
    spool.write(steps)
    spool.close()
    code, said = check(tmp_path / "run")
    assert code == 1, said
    assert "step 50" in said


def test_a_checkpoint_and_a_run_are_two_subjects(tmp_path: Path) -> None:
    run = Run(build(tmp_path / "run"))
    case = Case([run], load(plugins=False).instruments)
    assert isinstance(case.fact(RunRecord), RunRecord)
    for kind in (Checkpoint, InputRows):
        missing = case.fact(kind)
        assert isinstance(missing, Missing)
        assert missing.is_absent
        assert missing.outcome is Outcome.NOT_APPLICABLE
    without = Case([], load(plugins=False).instruments).fact(RunRecord)
    assert isinstance(without, Missing)
    assert without.is_absent


def test_a_running_or_killed_run_is_checked(tmp_path: Path) -> None:
    code, said = check(build(tmp_path / "run", close=False))
    assert code == 0, said
    assert Run(tmp_path / "run").info().facts["ended"] == "killed, crashed or still running"


def test_a_run_of_which_a_rank_is_missing_says_so(tmp_path: Path) -> None:
    build(tmp_path / "run", ranks=3)
    shutil.rmtree(tmp_path / "run" / "rank-00001")
    assert Run(tmp_path / "run").info().facts["ranks_missing"] == 1
    assert [r.facts.rank for r in Run(tmp_path / "run").record().ranks] == [0, 2]


def test_a_rank_without_steps_is_there(tmp_path: Path) -> None:
    build(tmp_path / "run")
    Spool(tmp_path / "run", make_facts(1)).close()
    ranks = Run(tmp_path / "run").record().ranks
    assert [len(r.steps) for r in ranks] == [100, 0]
    assert check(tmp_path / "run")[0] == 0


def test_links_to_rank_folders_are_followed(tmp_path: Path) -> None:
    build(tmp_path / "run", ranks=2)
    (tmp_path / "run" / "rank-00001").rename(tmp_path / "other-machine")
    (tmp_path / "run" / "rank-00001").symlink_to(tmp_path / "other-machine")
    assert len(Run(tmp_path / "run").record().ranks) == 2


# What is missing or foreign


def test_without_a_manifest_the_steps_are_judged(tmp_path: Path) -> None:
    (build(tmp_path / "run") / "rank-00000" / MANIFEST).unlink()
    run = Run(tmp_path / "run")
    assert run.record().ranks[0].facts == RunFacts(rank=0)
    assert "manifest.json is missing" in str(run.info().facts["damaged"])
    assert len(run.record().ranks[0].steps) == 100
    assert check(tmp_path / "run")[0] == 0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"rank": "zero"}', '{"trainable": 5}', '{"tokens": {"x": "y"}}', "\x00" * 100, '{"a":' * 100_000]
)
def test_a_damaged_manifest_is_told(tmp_path: Path, text: str) -> None:
    (build(tmp_path / "run") / "rank-00000" / MANIFEST).write_text(text)
    run = Run(tmp_path / "run")
    assert "manifest.json is damaged" in str(run.info().facts["damaged"])
    assert len(run.record().ranks[0].steps) == 100
    assert check(tmp_path / "run")[0] == 0


def test_a_manifest_of_another_rank_is_told(tmp_path: Path) -> None:
    build(tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "rank-00000", tmp_path / "run" / "rank-00003")
    run = Run(tmp_path / "run")
    assert [r.facts.rank for r in run.record().ranks] == [0, 3]
    assert "that of rank 0" in str(run.info().facts["damaged"])


def test_without_a_header_it_is_read_and_told(tmp_path: Path) -> None:
    (build(tmp_path / "run") / HEADER).unlink()
    run = open_subject(str(tmp_path / "run"))
    assert isinstance(run, Run)
    assert f"{HEADER} is missing" in str(run.info().facts["damaged"])


@pytest.mark.parametrize(
    ("header", "said"),
    [('{"ghoststep_run": 2}', "version 2"), ('{"ghoststep_run": "\\u001b[31m"}', "damaged"), ("", "damaged")],
)
def test_a_newer_or_damaged_header_is_refused(tmp_path: Path, header: str, said: str) -> None:
    (build(tmp_path / "run") / HEADER).write_text(header)
    with pytest.raises(SubjectError, match=said) as caught:
        open_subject(str(tmp_path / "run"))
    assert "\x1b" not in str(caught.value)
    assert check(tmp_path / "run")[0] == 2


def test_a_run_without_a_step_cannot_be_looked_at(tmp_path: Path) -> None:
    Spool(tmp_path / "run", make_facts()).close()
    with pytest.raises(CannotLook, match="no step"):
        Run(tmp_path / "run").record()
    code, said = check(tmp_path / "run")
    assert code == 2
    assert "before its first flush" in said
    shutil.rmtree(tmp_path / "run" / "rank-00000")
    code, said = check(tmp_path / "run")
    assert code == 2
    assert "holds no rank" in said


def test_a_checkpoint_folder_is_no_run(tmp_path: Path) -> None:
    assert not is_run_folder(tmp_path)
    assert not is_run_folder(tmp_path / "absent")
    assert not is_run_folder(Path("bad\0name"))
    (tmp_path / HEADER).mkdir()
    assert not is_run_folder(tmp_path)


def test_a_missing_segment_is_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spool, "segment_bytes", 3000)
    folder = build(tmp_path / "run", 400)
    files = segments(folder / "rank-00000")
    assert len(files) > 4
    files[2].unlink()
    (rank,) = Run(folder).record().ranks
    assert [g.reason for g in rank.gaps] == ["000002.seg is missing"]
    numbers = [s.number for s in rank.steps]
    assert numbers == sorted(set(numbers))
    assert rank.gaps[0].after in numbers
    assert rank.gaps[0].after + 1 not in numbers
    files[1].unlink()
    (rank,) = Run(folder).record().ranks
    assert rank.gaps[0].after == 0
    assert "missing" in rank.gaps[0].reason


def test_steps_that_come_twice_are_left_out(tmp_path: Path) -> None:
    folder = build(tmp_path / "run", 40)
    files = segments(folder / "rank-00000")
    shutil.copy(files[1], files[1].with_name("000002.seg"))
    (rank,) = Run(folder).record().ranks
    assert [s.number for s in rank.steps] == list(range(1, 41))
    assert "40 steps were left out" in rank.gaps[-1].reason


# Bounds


def test_only_the_last_steps_are_read_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spool, "segment_bytes", 3000)
    folder = build(tmp_path / "run", 1000)
    reading = run_ranks.read_rank(folder / "rank-00000", 0, max_steps=250)
    assert bits(reading.record.steps) == bits(quiet_step(n) for n in range(751, 1001))
    assert reading.has_more
    assert [(g.after, "only the last 250" in g.reason) for g in reading.record.gaps] == [(0, True)]
    assert reading.record.is_closed
    monkeypatch.setattr("ghoststep.subjects.run.MAX_STEPS", 250)
    assert Run(folder).info().facts["read"] == "only the last 250 steps a rank"
    whole = run_ranks.read_rank(folder / "rank-00000", 0, max_steps=1000)
    assert len(whole.record.steps) == 1000
    assert whole.record.gaps == ()
    assert not whole.has_more


def test_memory_is_shared_by_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(tmp_path / "run", 300, ranks=3)
    monkeypatch.setattr("ghoststep.subjects.run.MAX_RUN_BYTES", 600_000)
    reading = Run(folder).read()
    assert 300 < reading.num_steps < 600
    assert all(r.has_more and r.record.steps[-1].number == 300 for r in reading.ranks)


def test_the_estimate_of_memory_is_no_underestimate() -> None:
    """Against what Python says about every object, of steps that were read."""
    import sys

    import msgspec

    def size(value: object) -> int:
        if isinstance(value, tuple):
            return sys.getsizeof(value) + sum(map(size, value))
        if dataclasses.is_dataclass(value):
            return sys.getsizeof(value) + sum(size(getattr(value, f.name)) for f in dataclasses.fields(value))
        return sys.getsizeof(value)

    steps = msgspec.msgpack.decode(msgspec.msgpack.encode(make_steps(range(1, 400), norms=10)), type=list[Step])
    assert all(run_ranks._cost(s) >= 0.8 * size(s) for s in steps)
    wide = make_step(1, clip_action="\U0001f600" * 5000, nonfinite_before=("\u20ac" * 900,) * 4)
    assert run_ranks._cost(wide) >= size(wide) * 0.8


def test_names_of_strangers_are_escaped(tmp_path: Path) -> None:
    build(tmp_path / "run", model="\x1b[31mModel", trainable=("\x1b[2J", *NAMES))
    code, said = check(tmp_path / "run")
    assert code == 0
    assert "\x1b" not in said
