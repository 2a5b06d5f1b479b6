"""A census that was ended in any way goes on where it stopped, and its memory does not grow."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ghoststep.census import run
from ghoststep.census import survey as survey_module
from ghoststep.census.record import Record, Status
from ghoststep.census.spool import open_spool
from ghoststep.census.watched import Watched
from ghoststep.errors import CannotLook, UsageError
from ghoststep.registry import load
from tests.census.fleet import LETTER_A, MAMBA, Plan, files, write
from tests.local_hub import LocalHub
from tests.subjects.raw_files import MemorySource

INSTRUMENTS = load().instruments
Step = Callable[[run.Done], None]


def nothing(_: run.Done) -> None:
    pass


def fleet_of(count: int, root: Path) -> list[str]:
    return [str(write(Plan(name=f"m{i:03}", wiring=MAMBA, near=(LETTER_A,) * (i % 2), seed=i), root)) for i in range(count)]


def take(subjects: list[str], state: Path | None, *, jobs: int = 1, step: Step = nothing) -> run.Census:
    with open_spool(state) as kept:
        return run.run(subjects, INSTRUMENTS, run.Settings(jobs=jobs), kept, step)


def timeless(census: run.Census) -> list[Record]:
    return [replace(record, seconds=0.0) for record in census.records]


class Interrupt:
    """Raises KeyboardInterrupt when so many are done."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, _: run.Done) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("jobs", [1, 3])
def test_an_interrupt_keeps_what_is_finished(tmp_path: Path, jobs: int) -> None:
    subjects, state = fleet_of(12, tmp_path), tmp_path / "state.jsonl"
    first = take(subjects, state, jobs=jobs, step=Interrupt(5))
    assert first.is_interrupted
    assert (len(first.records), first.num_asked, first.num_stragglers) == (5, 12, 0)
    second = take(subjects, state, jobs=jobs)
    assert (second.num_resumed, second.is_interrupted) == (5, False)
    assert timeless(second) == timeless(take(subjects, None))
    third = take(subjects, state)
    assert third.num_resumed == 12


def test_after_an_interrupt_no_thread_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    real = survey_module.open_watched

    def open_watched(subject: str, **more: object) -> object:
        begun.append(subject)
        return real(subject, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "open_watched", open_watched)
    census = take(fleet_of(60, tmp_path), None, jobs=2, step=Interrupt(3))
    assert (len(census.records), census.num_stragglers) == (3, 0)
    assert len(begun) <= 40  # far from all, though the threads run on until the interrupt is seen


def test_kill_after_some_and_go_on(tmp_path: Path) -> None:
    subjects, state = fleet_of(50, tmp_path), tmp_path / "state.jsonl"
    command = [sys.executable, "-m", "ghoststep.cli.main", "census", "--state", str(state), "--jobs", "1", *subjects]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while (not state.exists() or state.read_bytes().count(b"\n") < 21) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it finished before it could be killed"
    finished = state.read_bytes().count(b"\n") - 1
    assert 20 <= finished < 50
    census = take(subjects, state)
    assert census.num_resumed == finished
    assert timeless(census) == timeless(take(subjects, None))


def test_a_torn_line_is_measured_again(tmp_path: Path) -> None:
    subjects, state = fleet_of(4, tmp_path), tmp_path / "state.jsonl"
    whole = take(subjects, state)
    size = state.stat().st_size
    os.truncate(state, size - 100)
    with open_spool(state) as kept:
        assert (len(kept), kept.num_torn) == (3, 1)
    again = take(subjects, state)
    assert again.num_resumed == 3
    assert timeless(again) == timeless(whole)
    assert take(subjects, state).num_resumed == 4


@pytest.mark.parametrize("kept_bytes", [0, 5])
def test_a_torn_header_is_a_new_state(tmp_path: Path, kept_bytes: int) -> None:
    subjects, state = fleet_of(2, tmp_path), tmp_path / "state.jsonl"
    take(subjects, state)
    os.truncate(state, kept_bytes)
    assert take(subjects, state).num_resumed == 0
    assert take(subjects, state).num_resumed == 2


@pytest.mark.parametrize("content", [b"my notes\n", b'{"ghoststep_census_state":999}\n', b"\xff\xfe\n", b"no newline"])
def test_a_file_that_is_no_state_is_left_alone(tmp_path: Path, content: bytes) -> None:
    state = tmp_path / "state.jsonl"
    state.write_bytes(content)
    with pytest.raises(UsageError, match="--state"):
        take(fleet_of(1, tmp_path), state)
    assert state.read_bytes() == content


def test_a_state_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read and written"):
        take(fleet_of(1, tmp_path), tmp_path / "absent" / "state.jsonl")


def test_failed_and_changed_ones_are_measured_again(tmp_path: Path) -> None:
    subjects, state = fleet_of(3, tmp_path), tmp_path / "state.jsonl"
    weights = Path(subjects[1]) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    assert [r.status for r in take(subjects, state).records] == [Status.OK, Status.FAILED, Status.OK]
    again = take(subjects, state)
    assert (again.num_resumed, again.records[1].status) == (2, Status.FAILED)
    weights.write_bytes(whole)
    assert [r.status for r in take(subjects, state).records] == [Status.OK] * 3
    Path(subjects[0], "model.safetensors").write_bytes(files(Plan(name="other", seed=99))["model.safetensors"])
    changed = take(subjects, state)
    assert changed.num_resumed == 2
    assert changed.records[0].fingerprint != again.records[0].fingerprint


def test_what_a_stranger_makes_a_library_raise_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """What pyo3 raises."""

    real = survey_module.survey

    def survey(opened: object, instruments: object) -> Record:
        name = getattr(opened, "subject", "")
        if name.endswith("m001"):
            raise Panic("boom")
        if name.endswith("m002"):
            raise MemoryError("too large")
        return real(opened, instruments)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "survey", survey)
    census = take(fleet_of(4, tmp_path), None, jobs=2)
    assert [r.status for r in census.records] == [Status.OK, Status.FAILED, Status.FAILED, Status.OK]
    assert "boom" in (census.records[1].reason or "")


def test_memory_does_not_grow_with_the_number_of_checkpoints(tmp_path: Path) -> None:
    subjects = fleet_of(100, tmp_path)
    marks: list[tuple[int, int]] = []

    def step(done: run.Done) -> None:
        if done.place in (29, 99):
            gc.collect()
            marks.append((tracemalloc.get_traced_memory()[0], len(os.listdir("/proc/self/fd"))))

    take(subjects[:5], None)
    tracemalloc.start()
    try:
        take(subjects, None, step=step)
    finally:
        tracemalloc.stop()
    (early, early_files), (late, late_files) = marks
    assert late - early < 70 * 4_000  # a record; the 320 norms alone would be 2,560 bytes more
    assert late_files <= early_files + 2


def test_a_branch_that_moved_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    state = tmp_path / "state.jsonl"
    with LocalHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add("org/a", files(Plan(name="a", seed=1)))
        first = take(["hf:org/a"], state, jobs=2)
        assert take(["hf:org/a", "hf:org/a@main"], state).num_resumed == 2
        sha = hub.add("org/a", files(Plan(name="a", seed=2)))
        moved = take(["hf:org/a"], state)
    assert (moved.num_resumed, moved.records[0].revision) == (0, sha)
    assert moved.records[0].fingerprint != first.records[0].fingerprint


def test_only_finished_records_are_kept(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    whole = Record(subject="a", name="a", status=Status.OK)
    with open_spool(state) as kept:
        kept.append("ok", whole)
        kept.append("part", replace(whole, status=Status.PARTIAL, reason="no tokenizer"))
        kept.append("cut", replace(whole, status=Status.PARTIAL, retry=True))
        kept.append("failed", replace(whole, status=Status.FAILED))
        kept.append("undone", whole)
        kept.append("undone", replace(whole, status=Status.FAILED))
    with open_spool(state) as kept:
        assert [kept.get(key) is not None for key in ("ok", "part", "cut", "failed", "undone")] == [
            True,
            True,
            False,
            False,
            False,
        ]
        assert kept.get("ok") == whole


class Refusing(MemorySource):
    """A place whose files cannot be read now."""

    def read(self, file: str, start: int, stop: int) -> bytes:
        raise CannotLook(f"{file}: refused")


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_read_that_the_network_refused_is_worth_another_try(is_remote: bool) -> None:
    source = Refusing({"x": b"1"}, is_remote=is_remote)
    watched = Watched(source, timeout_seconds=None, started=0.0, stop=threading.Event())
    with pytest.raises(CannotLook, match="refused"):
        watched.read("x", 0, 1)
    assert watched.was_cut_short is is_remote
