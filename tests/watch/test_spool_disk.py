"""A disk that is full, read-only or gone ends the record with one warning; training never sees an exception, and a reader no damage."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ghoststep.run_folder import segments
from ghoststep.run_frames import SegmentReader
from ghoststep.subjects.run import Run
from ghoststep.watching import spool as spool_module
from ghoststep.watching.spool import Spool
from tests.watch.spool_steps import bits, make_facts, make_steps


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.name == "ghoststep.watch" and r.levelno >= logging.WARNING]


def train(spool: Spool, num_flushes: int, first: int = 1) -> int:
    """Flushes of eight steps; the last step whose `write` returned while the spool had not failed."""
    kept = 0
    for start in range(first, first + 8 * num_flushes, 8):
        spool.write(make_steps(range(start, start + 8)))
        kept = kept if spool.failed else start + 7
        spool.write_event("finding", {"step": start})
        spool.update(make_facts(tokens={start: "x"}))
    spool.close()
    return kept


def whole(folder: Path, kept: int) -> str:
    """Every kept step is there, and nothing else is half there; the reasons of the gaps."""
    run = Run(folder)
    assert run.read().complaints == ()
    record = run.record().ranks[0]
    last = record.steps[-1].number
    assert kept <= last <= kept + 8
    assert bits(record.steps) == bits(make_steps(range(1, last + 1)))
    for path in segments(folder / "rank-00000").values():
        reader = SegmentReader(path)
        assert sum(1 for _ in reader) >= 0
        assert reader.damage is None, "half a frame was left"
    return "; ".join(g.reason for g in record.gaps)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False, timeout=20).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True, timeout=20)


def test_a_disk_that_is_really_full(tiny_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    spool = Spool(tiny_disk / "run", make_facts())
    kept = train(spool, 200)
    assert spool.failed is not None
    assert "No space left on device" in spool.failed
    assert len(warnings(caplog)) == 1
    assert f"steps up to {kept}" in warnings(caplog)[0]
    assert 8 <= kept < 1600
    whole(tiny_disk / "run", kept)


def test_a_disk_that_is_full_from_the_start(tiny_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tiny_disk / "run").mkdir()
    subprocess.run(["dd", "if=/dev/zero", f"of={tiny_disk}/.ballast", "bs=4k"], capture_output=True, check=False, timeout=20)
    spool = Spool(tiny_disk / "run", make_facts())
    assert train(spool, 3) == 0
    assert spool.failed is not None
    assert len(warnings(caplog)) == 1
    assert "No step is recorded" in warnings(caplog)[0]


def test_a_full_disk_that_is_emptied_takes_the_run_up_again(tiny_disk: Path) -> None:
    with (tiny_disk / ".ballast").open("wb") as file:
        file.write(bytes(32 << 10))
    (tiny_disk / "run").mkdir()
    kept = train(Spool(tiny_disk / "run", make_facts()), 200)
    (tiny_disk / ".ballast").unlink()
    spool = Spool(tiny_disk / "run", make_facts())
    assert spool.failed is None
    assert spool.last_number >= kept
    spool.write(make_steps([spool.last_number + 1]))
    spool.close()
    whole(tiny_disk / "run", spool.last_number)


LIMITED = """
import logging, pathlib, resource, sys
from ghoststep.watching.spool import Spool
from tests.watch.spool_steps import make_facts
from tests.watch.test_spool_disk import train
logging.basicConfig(stream=sys.stdout, format="LOG %(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
spool = Spool(pathlib.Path(sys.argv[1]), make_facts())
print(train(spool, 100), spool.failed, sep="|", flush=True)
"""


def test_a_file_size_limit(tmp_path: Path) -> None:
    """The kernel takes a part of the last frame, then refuses: the part is cut off again."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "run")], capture_output=True, text=True, check=True, timeout=60
    )
    *logged, last = done.stdout.splitlines()
    kept, said = last.split("|")
    assert "File too large" in said
    assert len(logged) == 1
    assert int(kept) >= 8
    assert (tmp_path / "run" / "rank-00000" / "000001.seg").stat().st_size <= 20_000
    whole(tmp_path / "run", int(kept))


def failing_after(num_calls: int, number: int, *, part: bool) -> Callable[[int, Any], int]:
    """An `os.write` that fails from its n-th call on with this errno, perhaps after a part."""
    real, seen = os.write, 0

    def write(descriptor: int, data: Any) -> int:
        nonlocal seen
        seen += 1
        if seen < num_calls:
            return real(descriptor, data)
        if part and seen == num_calls:
            return real(descriptor, data[: len(data) // 2])
        raise OSError(number, os.strerror(number))

    return write


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("num_calls", [1, 2, 3, 4, 5, 12, 40])
def test_any_write_may_fail(
    tmp_path: Path, num_calls: int, number: int, part: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "write", failing_after(num_calls, number, part=part))
    spool = Spool(tmp_path / "run", make_facts())
    kept = train(spool, 20)
    monkeypatch.undo()
    assert spool.failed is not None
    assert os.strerror(number) in spool.failed
    assert len(warnings(caplog)) == 1
    if kept:
        whole(tmp_path / "run", kept)
    again = Spool(tmp_path / "run", make_facts())  # the lock was given back, and the folder is not spoilt
    assert again.failed is None
    again.close()


@pytest.mark.parametrize("name", ["open", "fsync", "replace", "fstat", "scandir"])
def test_any_other_call_may_fail(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for late in (False, True):
        folder = tmp_path / f"run-{late}"
        if not late:
            monkeypatch.setattr(os, name, _no_permission)
        spool = Spool(folder, make_facts())
        monkeypatch.setattr(os, name, _no_permission)
        train(spool, 3)
        monkeypatch.undo()
        assert spool.failed is not None or (late and name == "scandir")  # that one is only needed at the beginning
    assert len(warnings(caplog)) <= 2


def _no_permission(*_: Any, **__: Any) -> Any:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    spool = Spool(tmp_path / "run", make_facts())
    assert train(spool, 5) == 40
    assert whole(tmp_path / "run", 40) == ""


def test_an_interrupt_in_the_middle_of_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is passed on, and the frames after it can be read."""
    real = os.write

    def interrupted(descriptor: int, data: Any) -> int:
        real(descriptor, data[: len(data) // 2])
        raise KeyboardInterrupt

    def interrupted_late(descriptor: int, data: Any) -> int:
        real(descriptor, data)
        raise KeyboardInterrupt

    spool = Spool(tmp_path / "run", make_facts())
    spool.write(make_steps(range(1, 9)))
    for write in (interrupted, interrupted_late):
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(KeyboardInterrupt):
            spool.write(make_steps(range(9, 17)))
        monkeypatch.undo()
    spool.write(make_steps(range(17, 25)))
    spool.close()
    assert spool.failed is None
    assert whole(tmp_path / "run", 24) == ""


def test_half_a_frame_that_cannot_be_cut_off_costs_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path / "run", make_facts())
    spool.write(make_steps(range(1, 9)))
    with (spool.folder / "000001.seg").open("ab") as file:
        file.write(b"GSF1 somebody else's bytes")
    spool.write(make_steps(range(9, 17)))
    spool.close()
    record = Run(tmp_path / "run").record().ranks[0]
    assert bits(record.steps) == bits(make_steps(range(1, 17)))
    assert list(segments(spool.folder)) == [1, 2]


@pytest.mark.parametrize("what", ["run", "rank"])
def test_a_folder_that_is_removed_while_training(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    spool = Spool(tmp_path / "run", make_facts())
    spool.write(make_steps([1]))
    shutil.rmtree(spool.folder if what == "rank" else tmp_path / "run")
    assert train(spool, 5, first=2) == 0
    assert spool.failed is not None
    assert "removed" in spool.failed
    assert len(warnings(caplog)) == 1
    assert not spool.folder.exists()


def test_a_folder_that_is_moved_goes_on(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "run", make_facts())
    spool.write(make_steps([1]))
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    spool.write(make_steps([2]))
    assert spool.failed is None
    assert len(Run(tmp_path / "elsewhere").record().ranks[0].steps) == 2
    spool.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("x")
    spool = Spool(tmp_path / "file" / "run", make_facts())
    assert train(spool, 2) == 0
    assert spool.failed is not None
    assert len(warnings(caplog)) == 1


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount")
def test_a_file_system_that_is_really_read_only(tiny_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Root may write anywhere, except where nobody may."""
    train(Spool(tiny_disk / "run", make_facts()), 2)
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True, timeout=20)
    for folder in (tiny_disk / "run", tiny_disk / "new"):
        caplog.clear()
        spool = Spool(folder, make_facts())
        assert train(spool, 2, first=17) == 0
        assert spool.failed is not None
        assert "Read-only file system" in spool.failed
        assert len(warnings(caplog)) == 1
    whole(tiny_disk / "run", 16)


def test_a_step_that_cannot_be_said_does_not_end_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path / "run", make_facts())
    spool.write(make_steps([1]))

    class _Odd:
        def item(self) -> Any:
            raise RuntimeError("a tensor with many elements")

    spool.write(make_steps([2], loss=_Odd()))
    spool.write(make_steps([3], loss="three"))  # written, and refused by the reader
    spool.write(make_steps([4]))
    spool.close()
    assert spool.failed is None
    record = Run(tmp_path / "run").record().ranks[0]
    assert [s.number for s in record.steps] == [1, 4]
    said = "; ".join(g.reason for g in record.gaps)
    assert "steps 2 to 2 could not be written: RuntimeError" in said
    assert "Expected `float | null`, got `str`" in said


def test_a_defect_of_ours_ends_the_record_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path / "run", make_facts())
    monkeypatch.setattr(spool_module, "encode_manifest", _no_permission)
    spool.update(make_facts(tokens={1: "x"}))
    assert spool.failed is not None
    assert len(warnings(caplog)) == 1
    spool.close()
