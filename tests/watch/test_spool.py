"""The record of a run on disk: what is written comes back bit for bit, one writer a rank, and a run goes on where it ended."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import msgspec
import pytest

from ghoststep.errors import UsageError
from ghoststep.evidence.steps import RunRecord
from ghoststep.evidence.training import OptimizerGroup
from ghoststep.run_folder import HEADER, MANIFEST, read_manifest, segments
from ghoststep.run_frames import MAX_INFLATED_BYTES, STEPS, encode_frame
from ghoststep.subjects.run import Run
from ghoststep.watching import spool_files
from ghoststep.watching.spool import RESUMED, RESUMED_AFTER_KILL, Spool
from tests.watch.spool_steps import NAMES, bits, make_facts, make_step, make_steps


def record(folder: Path) -> RunRecord:
    return Run(folder).record()


def write(folder: Path, first: int, last: int, *, close: bool = True, rank: int = 0) -> Spool:
    spool = Spool(folder, make_facts(rank))
    for start in range(first, last + 1, 32):
        spool.write(make_steps(range(start, min(start + 32, last + 1))))
    if close:
        spool.close()
    return spool


def abandon(spool: Spool) -> None:
    """As far as files go, what a kill does: nothing is said, descriptors are closed."""
    spool._release()


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line_of(process: subprocess.Popen[str], seconds: float = 30) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], seconds)[0], "nothing came"
    return process.stdout.readline().strip()


HOLDING = """
import pathlib, sys
from ghoststep.watching.spool import Spool
from tests.watch.spool_steps import make_facts, make_steps
spool = Spool(pathlib.Path(sys.argv[1]), make_facts(int(sys.argv[2])))
spool.write(make_steps(range(spool.last_number + 1, spool.last_number + 11)))
print(spool.failed or "written", flush=True)
sys.stdin.readline()
"""


def test_what_is_written_comes_back_bit_for_bit(tmp_path: Path) -> None:
    spool = write(tmp_path / "run", 1, 100)
    assert spool.failed is None
    (rank,) = record(tmp_path / "run").ranks
    assert bits(rank.steps) == bits(make_steps(range(1, 101)))
    assert rank.is_closed
    assert rank.gaps == ()
    assert rank.facts == make_facts()
    assert sorted(p.name for p in (tmp_path / "run").rglob("*") if p.is_file()) == sorted(
        ["000001.seg", HEADER, "lock", MANIFEST]
    )


def test_full_detail_comes_back_and_large_flushes_are_split(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "run", make_facts())
    steps = make_steps(range(1, 33), norms=50_000)  # 6.4 MB in one flush
    spool.write(steps)
    too_large = make_step(33, norms=MAX_INFLATED_BYTES // 4)
    spool.write([too_large])
    spool.close()
    (rank,) = record(tmp_path / "run").ranks
    assert bits(rank.steps[:32]) == bits(steps)
    assert bits(rank.steps[32:]) == bits([make_step(33)])  # the norms alone were too much; the step is there


def test_segments_are_rotated_and_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spool, "segment_bytes", 20_000)
    write(tmp_path / "run", 1, 2000)
    files = segments(tmp_path / "run" / "rank-00000")
    assert list(files) == list(range(1, len(files) + 1))
    assert len(files) > 5
    assert all(p.stat().st_size <= 20_000 for p in files.values())
    (rank,) = record(tmp_path / "run").ranks
    assert bits(rank.steps) == bits(make_steps(range(1, 2001)))


def test_a_running_record_can_be_read(tmp_path: Path) -> None:
    spool = write(tmp_path / "run", 1, 40, close=False)
    assert len(record(tmp_path / "run").ranks[0].steps) == 40
    assert not record(tmp_path / "run").ranks[0].is_closed
    spool.write(make_steps([41]))
    assert len(record(tmp_path / "run").ranks[0].steps) == 41
    spool.close()


def test_events_are_kept_and_broken_hooks_come_back(tmp_path: Path) -> None:
    spool = write(tmp_path / "run", 1, 3, close=False)
    spool.write_event("finding", MappingProxyType({"code": "GS401", "step": 3, "value": float("nan"), "names": ("a", "b")}))
    spool.write_event("broken", {"hook": "forward", "reason": "ValueError: \x1b[31mno"})
    spool.write_event("broken", {"hook": "forward", "reason": "ValueError: \x1b[31mno"})
    spool.write_event("odd", {"token": "\ud800", "path": tmp_path, "large": 1 << 80})
    circle: dict[str, object] = {}
    circle["me"] = circle
    spool.write_event("circle", circle)
    spool.write_event("huge", {"text": "x" * (MAX_INFLATED_BYTES + 1)})
    spool.close()
    assert spool.failed is None
    run = Run(tmp_path / "run")
    assert run.record().broken == ("forward: ValueError: \\x1b[31mno",)
    kinds = {e.kind: e.payload for e in run.events()}
    assert kinds["finding"]["code"] == "GS401"
    assert kinds["finding"]["names"] == ["a", "b"]
    assert kinds["odd"]["token"] == "\\ud800"
    assert "unwritable" in kinds["circle"]
    assert "unwritable" in kinds["huge"]
    assert len(run.record().ranks[0].steps) == 3


def test_the_manifest_takes_new_tokens_and_keeps_old_ones(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "run", make_facts(tokens={5: "five"}))
    odd = OptimizerGroup(
        index=0, optimizer="SGD", lr=float("nan"), initial_lr=float("inf"), weight_decay=-0.0, num_tensors=1, num_frozen=0
    )
    spool.update(make_facts(tokens={7: "\ud800<b>\x1b"}, groups=(odd,), schedule="LambdaLR", run_id="other", started_at=1.0))
    facts = read_manifest(spool.folder)
    assert facts.tokens == {5: "five", 7: "\\ud800<b>\x1b"}
    assert facts.schedule == "LambdaLR"
    assert (facts.run_id, facts.started_at) == ("run-a", 1.7e9)
    assert msgspec.msgpack.encode(facts.groups[0]) == msgspec.msgpack.encode(odd)
    before = (spool.folder / MANIFEST).stat().st_mtime_ns
    spool.update(make_facts(tokens={7: "\ud800<b>\x1b"}, groups=(odd,), schedule="LambdaLR"))
    spool.close()
    assert spool.failed is None
    assert before == (spool.folder / MANIFEST).stat().st_mtime_ns  # nothing new: not written again
    assert not (spool.folder / f"{MANIFEST}.tmp").exists()


def test_a_manifest_beyond_the_readers_limit_loses_tokens_not_names(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "run", make_facts(tokens=dict.fromkeys(range(6000), "x" * 2000)))
    spool.close()
    facts = read_manifest(spool.folder)
    assert facts.trainable == NAMES
    assert 1000 < len(facts.tokens) < 6000
    assert min(facts.tokens) == 0


# Going on


def test_a_closed_run_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "run", 1, 40)
    spool = Spool(tmp_path / "run", make_facts(run_id="run-b", started_at=2e9))
    assert spool.last_number == 40
    assert spool.run_id == "run-a"
    spool.write(make_steps(range(41, 51)))
    spool.close()
    (rank,) = record(tmp_path / "run").ranks
    assert bits(rank.steps) == bits(make_steps(range(1, 51)))
    assert [(g.after, g.reason) for g in rank.gaps] == [(40, RESUMED)]
    assert rank.is_closed
    assert (rank.facts.run_id, rank.facts.started_at) == ("run-a", 1.7e9)


def test_a_killed_run_goes_on_and_says_so(tmp_path: Path) -> None:
    abandon(write(tmp_path / "run", 1, 40, close=False))
    with (tmp_path / "run" / "rank-00000" / "000001.seg").open("ab") as file:
        file.write(encode_frame(STEPS, make_steps([41, 42]), number=2)[:150])
    write(tmp_path / "run", 41, 50)
    (rank,) = record(tmp_path / "run").ranks
    assert bits(rank.steps) == bits(make_steps(range(1, 51)))
    assert [(g.after, g.reason) for g in rank.gaps] == [(40, RESUMED_AFTER_KILL)]
    assert Run(tmp_path / "run").read().complaints == ()  # half a frame is what a kill leaves, no damage


def test_going_on_again_and_again_without_a_step(tmp_path: Path) -> None:
    write(tmp_path / "run", 1, 5)
    for _ in range(3):
        assert write(tmp_path / "run", 1, 0).last_number == 5
    write(tmp_path / "run", 6, 6)
    (rank,) = record(tmp_path / "run").ranks
    assert [s.number for s in rank.steps] == [1, 2, 3, 4, 5, 6]
    assert [g.after for g in rank.gaps] == [5] * 4


@pytest.mark.parametrize(
    ("names", "said"),
    [((*NAMES, "lora.weight"), "'lora.weight'"), (NAMES[1:], repr(NAMES[0])), (tuple(reversed(NAMES)), "another order")],
)
def test_another_model_is_refused(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    write(tmp_path / "run", 1, 5)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "lock"}
    with pytest.raises(UsageError, match="another model") as caught:
        Spool(tmp_path / "run", make_facts(trainable=names))
    assert said in str(caught.value)
    assert "run_dir=" in str(caught.value)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "lock"} == before
    write(tmp_path / "run", 6, 6)  # the refused one holds no lock


def test_a_folder_without_steps_takes_any_model(tmp_path: Path) -> None:
    write(tmp_path / "run", 1, 0)
    spool = Spool(tmp_path / "run", make_facts(trainable=("other",)))
    assert spool.failed is None
    spool.close()


def test_a_newer_format_and_a_damaged_header_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "run", 1, 5)
    for header, said in ((b'{"ghoststep_run": 7, "run_id": {}}', "version 7"), (b"{", "damaged")):
        (tmp_path / "run" / HEADER).write_bytes(header)
        with pytest.raises(UsageError, match=said):
            Spool(tmp_path / "run", make_facts())
        assert (tmp_path / "run" / HEADER).read_bytes() == header


def test_a_file_and_a_folder_of_other_things_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        Spool(tmp_path / "file", make_facts())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"config\.json"):
        Spool(tmp_path / "model", make_facts())
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["config.json"]


def test_a_linked_folder_works(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", 1, 5)
    write(tmp_path / "link", 6, 9)
    assert len(record(tmp_path / "real").ranks[0].steps) == 9
    assert len(record(tmp_path / "link").ranks[0].steps) == 9


# One writer


def test_a_second_writer_is_refused_by_name_and_a_killed_one_is_not_in_the_way(tmp_path: Path) -> None:
    first = child(HOLDING, tmp_path / "run", 0)
    try:
        assert line_of(first) == "written"
        with pytest.raises(UsageError, match=f"process {first.pid}"):
            Spool(tmp_path / "run", make_facts())
        second = child(HOLDING, tmp_path / "run", 0)
        second.communicate(timeout=30)
        assert second.returncode != 0
        write(tmp_path / "run", 1, 3, rank=1)  # another rank may
    finally:
        first.kill()
        first.wait(timeout=30)
    third = child(HOLDING, tmp_path / "run", 0)
    assert line_of(third) == "written"
    third.communicate("\n", timeout=30)
    assert third.returncode == 0
    zero, one = record(tmp_path / "run").ranks
    assert bits(zero.steps) == bits(make_steps(range(1, 21)))
    assert [g.reason for g in zero.gaps] == [RESUMED_AFTER_KILL]
    assert [s.number for s in one.steps] == [1, 2, 3]


def test_two_writers_in_one_process(tmp_path: Path) -> None:
    spool = write(tmp_path / "run", 1, 3, close=False)
    with pytest.raises(UsageError, match=f"process {os.getpid()}"):
        Spool(tmp_path / "run", make_facts())
    spool.write(make_steps([4]))
    spool.close()
    spool.close()
    spool.write(make_steps([5]))
    spool.write_event("late", {})
    spool.update(make_facts(tokens={1: "x"}))
    assert len(record(tmp_path / "run").ranks[0].steps) == 4
    write(tmp_path / "run", 5, 5)


def test_ranks_that_start_at_once_share_a_folder(tmp_path: Path) -> None:
    writers = [child(HOLDING, tmp_path / "run", rank) for rank in range(4)]
    assert [line_of(w) for w in writers] == ["written"] * 4
    for writer in writers:
        writer.communicate("\n", timeout=30)
        assert writer.returncode == 0
    ranks = record(tmp_path / "run").ranks
    assert [r.facts.rank for r in ranks] == [0, 1, 2, 3]
    assert all(len(r.steps) == 10 for r in ranks)
    assert [p.name for p in (tmp_path / "run").glob("*.tmp")] == []


FORKING = """
import os, pathlib, sys, time
from ghoststep.watching.spool import Spool
from tests.watch.spool_steps import make_facts, make_steps
spool = Spool(pathlib.Path(sys.argv[1]), make_facts())
spool.write(make_steps([1]))
if os.fork() == 0:
    spool.write(make_steps([2]))
    spool.write_event("child", {})
    spool.close()
    print(os.getpid() if spool.failed is None else spool.failed, flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_worker_writes_nothing_and_holds_no_lock(tmp_path: Path) -> None:
    parent = child(FORKING, tmp_path / "run")
    worker = int(line_of(parent))
    try:
        with pytest.raises(UsageError, match=f"process {parent.pid}"):  # what the worker closed was its own
            Spool(tmp_path / "run", make_facts())
        parent.kill()
        parent.wait(timeout=30)
        os.kill(worker, 0)  # it lives on
        write(tmp_path / "run", 2, 3)
    finally:
        parent.kill()
        os.kill(worker, 9)
    (rank,) = record(tmp_path / "run").ranks
    assert bits(rank.steps) == bits(make_steps([1, 2, 3]))
    assert list(Run(tmp_path / "run").events()) == []


@pytest.mark.parametrize("how", ["no flock", "no fcntl"])
def test_without_locks_it_says_so_and_records(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "no fcntl":
        monkeypatch.setattr(spool_files, "_FCNTL", None)
    else:

        def refuse(*_: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(spool_files._FCNTL, "flock", refuse)
    with caplog.at_level(logging.WARNING, "ghoststep.watch"):
        spool = write(tmp_path / "run", 1, 3)
    assert "no" in spool.unlocked
    assert "locks" in spool.unlocked
    assert [r.message for r in caplog.records if "would not be noticed" in r.message] != []
    assert len(record(tmp_path / "run").ranks[0].steps) == 3


def test_a_step_takes_few_bytes(tmp_path: Path) -> None:
    """Flushes of 32 steps with rows."""
    spool = Spool(tmp_path / "run", make_facts())
    flushes = [make_steps(range(start, start + 32)) for start in range(1, 1600, 32)]
    for flush in flushes:
        spool.write(flush)
    spool.close()
    size = sum(p.stat().st_size for p in segments(spool.folder).values())
    assert size / 1600 < 500
