"""Run folders from strangers, and from bad disks: nothing false comes out, nothing hangs, and memory is bounded."""

from __future__ import annotations

import dataclasses
import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.watch.spool_steps import bits, make_facts, make_step, make_steps

from ghoststep import run_frames
from ghoststep.errors import CannotLook
from ghoststep.run_folder import HEADER, LOCK, MANIFEST, read_tail, segments
from ghoststep.run_frames import (
    MAX_FRAME_BYTES,
    MAX_INFLATED_BYTES,
    Damage,
    FrameTooLargeError,
    SegmentReader,
    encode_frame,
)
from ghoststep.subjects.run import Run
from ghoststep.watching.spool import Spool

FLUSH = 8
_KEYS = ["number", "ended_at", "loss", "after", "reason", "kind", "payload", "hook"]


def frame(
    content: bytes, *, number: int = 0, magic: bytes = b"GSF1", length: int | None = None, is_stored: bool = False
) -> bytes:
    """A frame with a right checksum around any content."""
    stored = content if is_stored else zlib.compress(content)
    head = struct.pack("<4sII", magic, number, len(stored) if length is None else length)
    return head + struct.pack("<I", zlib.crc32(stored, zlib.crc32(head))) + stored


def read(path: Path) -> tuple[list[str], Damage | None]:
    reader = SegmentReader(path)
    return [f.kind for f in reader], reader.damage


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run of 120 steps in a few segments."""
    folder = tmp_path_factory.mktemp("good") / "run"
    spool = Spool(folder, make_facts())
    spool.segment_bytes = 10_000
    for start in range(1, 121, FLUSH):
        spool.write(make_steps(range(start, start + FLUSH)))
    spool.close()
    assert len(segments(spool.folder)) == 3
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def lay(folder: Path, files: dict[str, bytes]) -> Path:
    (folder / "rank-00000").mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


WHOLE = encode_frame("closed", {}, number=0)
Spoil = Callable[[bytes], bytes]
WRITTEN = bits(make_steps(range(1, 121)))


def spoils() -> st.SearchStrategy[Spoil]:
    place, some = st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=40)

    def cut(at: float) -> Spoil:
        return lambda data: data[: int(at * len(data))]

    def flip(at: float, mask: int) -> Spoil:
        def spoil(data: bytes) -> bytes:
            i = int(at * len(data))
            return data[:i] + bytes([data[i] ^ mask]) + data[i + 1 :] if data else data

        return spoil

    def insert(at: float, what: bytes) -> Spoil:
        return lambda data: data[: int(at * len(data))] + what + data[int(at * len(data)) :]

    def overwrite(at: float, what: bytes) -> Spoil:
        return lambda data: data[: int(at * len(data))] + what + data[int(at * len(data)) + len(what) :]

    def drop(at: float, length: int) -> Spoil:
        return lambda data: data[: int(at * len(data))] + data[int(at * len(data)) + length :]

    return st.one_of(
        st.builds(cut, place), st.builds(flip, place, st.integers(1, 255)), st.builds(insert, place, some),
        st.builds(overwrite, place, some | st.just(bytes(4096))), st.builds(drop, place, st.integers(1, 3000)),
    )  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["000001", "000002", "000003"]), spoil=st.lists(spoils(), min_size=1, max_size=3))
def test_damaged_bytes_make_no_false_step(tmp_path: Path, good: dict[str, bytes], name: str, spoil: list[Spoil]) -> None:
    file = f"rank-00000/{name}.seg"
    data = good[file]
    for one in spoil:
        data = one(data)
    run = Run(lay(tmp_path / "run", {**good, file: data}))
    (rank,) = run.record().ranks
    numbers = [s.number for s in rank.steps]
    assert bits(rank.steps) == [WRITTEN[n - 1] for n in numbers]  # what comes back is what was written, or does not come back
    assert numbers == sorted(set(numbers))
    missing = set(range(1, 121)) - set(numbers)
    same = next((i for i, (a, b) in enumerate(zip(data, good[file], strict=False)) if a != b), min(len(data), len(good[file])))
    before = data[:same]  # every whole frame of the unspoilt beginning is read
    kept = sum(len(msgspec.msgpack.decode(f.data)) for f in _whole(tmp_path, before) if f.kind == "steps")
    first = {"000001": 0, "000002": 1, "000003": 2}[name]
    starts = [n for i in range(first) for n in _numbers(tmp_path, good[f"rank-00000/00000{i + 1}.seg"])]
    assert not missing & set(starts)
    assert not missing & set(_numbers(tmp_path, good[file])[:kept])
    if missing and name != "000003":  # the end of the last one may just not have been written yet
        assert rank.gaps != ()
    tail = read_tail(tmp_path / "run" / "rank-00000")
    assert tail.last_number <= 120
    assert tail.last_number == (numbers[-1] if name != "000003" or numbers[-1] > 1 else tail.last_number)


def test_damage_in_the_last_segment_is_told(tmp_path: Path, good: dict[str, bytes]) -> None:
    """No step comes after it whose number would tell."""
    file = "rank-00000/000003.seg"
    data = bytearray(good[file])
    data[len(data) // 2] ^= 1
    run = Run(lay(tmp_path / "run", {**good, file: bytes(data)}))
    (rank,) = run.record().ranks
    assert not rank.is_closed
    assert [(g.after, "000003.seg is damaged at byte" in g.reason) for g in rank.gaps] == [(rank.steps[-1].number, True)]
    assert "the checksum of a frame differs" in str(run.info().facts["damaged"])


def test_a_damaged_segment_is_named_once(tmp_path: Path, good: dict[str, bytes]) -> None:
    spoilt = {name: b"?" + data[1:] if name.endswith(".seg") else data for name, data in good.items()}
    with pytest.raises(CannotLook) as raised:
        Run(lay(tmp_path / "run", spoilt)).record()
    for number in (1, 2, 3):
        assert str(raised.value).count(f"{number:06d}.seg is damaged at byte 0") == 1


def _whole(tmp_path: Path, data: bytes) -> list[run_frames.Frame]:
    (tmp_path / "part.seg").write_bytes(data)
    return list(SegmentReader(tmp_path / "part.seg"))


def _numbers(tmp_path: Path, data: bytes) -> list[int]:
    return [s["number"] for f in _whole(tmp_path, data) if f.kind == "steps" for s in msgspec.msgpack.decode(f.data)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(max_size=300), name=st.sampled_from([HEADER, f"rank-00000/{MANIFEST}", "rank-00000/000002.seg"]))
def test_garbage_in_any_file_is_no_defect(tmp_path: Path, good: dict[str, bytes], garbage: bytes, name: str) -> None:
    run = Run(lay(tmp_path / "run", {**good, name: garbage}))
    record = run.record()
    assert record.ranks[0].steps != ()
    run.info()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["steps", "gap", "event", "closed", "other", ""]),
    data=st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=5),
        max_leaves=12,
    ),
)  # fmt: skip
def test_frames_that_hold_other_things_are_passed_over(tmp_path: Path, good: dict[str, bytes], kind: str, data: Any) -> None:
    odd = frame(msgspec.msgpack.encode((kind, data)))
    files = {**good, "rank-00000/000001.seg": odd + encode_frame("steps", make_steps(range(1, 41)), number=1)}
    run = Run(lay(tmp_path / "run", files))
    (rank,) = run.record().ranks
    assert {s.number for s in rank.steps} >= set(range(1, 121)) - ({*range(1, 41)} if kind == "steps" else set())
    run.info()
    list(run.events())


def test_wrong_types_are_told_and_the_rest_is_read(tmp_path: Path, good: dict[str, bytes]) -> None:
    wrong = [
        [{**_plain(1), "number": 0}],
        [{**_plain(1), "number": 1 << 62}],
        [{**_plain(1), "rows": 5}],
        [{**_plain(1), "outcome": "\x1b[31m"}],
        [_plain(3), _plain(2)],
        [[]],
        "steps",
    ]
    data = b"".join(frame(msgspec.msgpack.encode(("steps", w)), number=i) for i, w in enumerate(wrong))
    data += encode_frame("steps", make_steps(range(5, 20)), number=len(wrong))
    (rank,) = Run(lay(tmp_path / "run", {HEADER: good[HEADER], "rank-00000/000001.seg": data})).record().ranks
    assert bits(rank.steps) == bits(make_steps(range(5, 20)))
    assert len(rank.gaps) == len(wrong)
    assert not any("\x1b" in g.reason for g in rank.gaps)


def _plain(number: int) -> dict[str, Any]:
    return dict(msgspec.to_builtins(make_step(number), builtin_types=(bytes,)))


def test_fields_of_a_later_version_are_passed_over(tmp_path: Path, good: dict[str, bytes]) -> None:
    data = encode_frame("steps", [{**_plain(1), "new_field": {"a": 1}}], number=0) + encode_frame("new", [1], number=1)
    (rank,) = Run(lay(tmp_path / "run", {**good, "rank-00000/000001.seg": data})).record().ranks
    assert bits(rank.steps[:1]) == bits([make_step(1)])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (frame(b"x", length=1 << 31), "at most"),
        (frame(b"x", length=MAX_FRAME_BYTES), "ends within"),
        (frame(b"x", magic=b"GSF2"), "no frame begins"),
        (frame(b"x", number=1), "frame 1 where frame 0"),
        (frame(b"x", is_stored=True), "does not inflate"),
        (frame(zlib.compress(b"abc")[:-3], is_stored=True), "to its end"),
        (frame(zlib.compress(b"abc") + b"more", is_stored=True), "to its end"),
        (frame(bytes(MAX_INFLATED_BYTES + 1)), "more than"),
        (WHOLE[:12] + b"\0\0\0\0" + WHOLE[16:], "checksum"),
        (frame(b""), "no pair"),
        (frame(msgspec.msgpack.encode(["steps"])), "no pair"),
        (frame(msgspec.msgpack.encode([1, 2])), "no pair"),
        (frame(b"\x92\xa1\xff\xc0"), "no pair"),
        (frame(b"\x91" * 100_000), "no pair"),
        (frame(b"\x92\xa1a" + b"\x91" * 100_000), "no pair"),
        (bytes(5000), "no frame begins"),
        (b"GSF1", "within the header"),
    ],
)
def test_hostile_frames(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "a.seg").write_bytes(encode_frame("closed", {}, number=0) + data)
    (tmp_path / "b.seg").write_bytes(data)
    assert read(tmp_path / "a.seg")[0] == ["closed"]
    kinds, damage = read(tmp_path / "b.seg")
    assert kinds == []
    assert damage is not None
    assert said in damage.reason


def test_the_writer_never_exceeds_what_the_reader_accepts() -> None:
    with pytest.raises(FrameTooLargeError):
        encode_frame("steps", [make_step(1, norms=MAX_INFLATED_BYTES // 4)], number=0)
    noise = os.urandom(MAX_INFLATED_BYTES - 1000)
    assert len(encode_frame("event", noise, number=0, level=1)) < MAX_FRAME_BYTES


@pytest.mark.parametrize("what", ["bombs", "small", "ints"])
def test_memory_stays_bounded(tmp_path: Path, good: dict[str, bytes], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that inflate a thousandfold, to rows, to nothing much, or to numbers of one byte."""
    if what == "bombs":
        many = [{**_plain(1), "number": n, "rows": [_plain(1)["rows"][0]] * 200} for n in range(1, 60)]
    elif what == "small":
        many = [{"number": n, "ended_at": 0} for n in range(1, 10_000)]
    else:
        many = [{"number": 1, "ended_at": 0, "lrs": [0] * 300_000}]

    def renumbered(i: int) -> list[dict[str, Any]]:
        return [{**s, "number": s["number"] + i * len(many)} for s in many]

    data = b"".join(encode_frame("steps", renumbered(i), number=i, level=9) for i in range(12))
    assert len(data) < 8 << 20
    run = Run(lay(tmp_path / "run", {**good, "rank-00000/000004.seg": data}))
    monkeypatch.setattr("ghoststep.subjects.run.MAX_RUN_BYTES", 20 << 20)
    tracemalloc.start()
    try:
        reading = run.read()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60 << 20  # the whole would be 120 MiB or more
    assert reading.ranks[0].has_more


def test_a_segment_that_inflates_without_end_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_frames, "MAX_SEGMENT_INFLATED_BYTES", 1 << 20)
    (tmp_path / "a.seg").write_bytes(b"".join(encode_frame("event", bytes(300_000), number=i) for i in range(10)))
    kinds, damage = read(tmp_path / "a.seg")
    assert len(kinds) == 3
    assert damage is not None
    assert "inflate" in damage.reason


def test_a_segment_that_does_not_end_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_frames, "MAX_SEGMENT_BYTES", 10_000)
    (tmp_path / "a.seg").write_bytes(b"".join(encode_frame("event", os.urandom(900), number=i) for i in range(30)))
    kinds, damage = read(tmp_path / "a.seg")
    assert 8 <= len(kinds) <= 11
    assert damage is not None
    with (tmp_path / "sparse.seg").open("wb") as file:
        file.truncate(1 << 40)
    assert read(tmp_path / "sparse.seg")[0] == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize("name", [HEADER, f"rank-00000/{MANIFEST}", "rank-00000/000001.seg", "rank-00000/000009.seg"])
@pytest.mark.parametrize("what", ["pipe", "link", "endless", "folder"])
def test_what_is_no_file_is_not_followed(tmp_path: Path, good: dict[str, bytes], name: str, what: str) -> None:
    folder = lay(tmp_path / "run", good)
    (folder / name).unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(folder / name)
    elif what == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to("/dev/zero" if what == "endless" else folder / "rank-00000" / "000002.seg")
    run = Run(folder)
    record = run.record()
    assert record.ranks[0].steps != ()
    assert name == HEADER or run.read().complaints != ()


def test_a_folder_of_very_many_files_is_refused(
    tmp_path: Path, good: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ghoststep.run_folder.MAX_ENTRIES", 20)
    folder = lay(tmp_path / "run", good)
    for i in range(30):
        (folder / "rank-00000" / f"{i}.x").touch()
    with pytest.raises(CannotLook, match="more than 20"):
        Run(folder).record()


def test_very_many_gaps_are_counted_not_kept(tmp_path: Path, good: dict[str, bytes]) -> None:
    data = b"".join(encode_frame("gap", {"after": i, "reason": "x" * 9000}, number=i) for i in range(3000))
    (rank,) = Run(lay(tmp_path / "run", {**good, "rank-00000/000001.seg": data})).record().ranks
    assert len(rank.gaps) < 300
    assert all(len(g.reason) < 1000 for g in rank.gaps)
    assert any("gaps more" in g.reason for g in rank.gaps)


def test_times_that_are_none_are_left_out(tmp_path: Path) -> None:
    for i, time in enumerate((float("nan"), float("inf"), -1e300, 1e15)):
        spool = Spool(tmp_path / str(i), make_facts(started_at=time))
        spool.write([dataclasses.replace(make_step(1), ended_at=time)])
        spool.close()
        assert spool.failed is None
        assert "recorded" not in Run(tmp_path / str(i)).info().facts


def test_a_lock_file_of_a_stranger_is_only_read_as_text(tmp_path: Path, good: dict[str, bytes]) -> None:
    spool = Spool(lay(tmp_path / "run", {**good, f"rank-00000/{LOCK}": b"\xff" * 5000}), make_facts())
    assert spool.failed is None
    assert spool.last_number == 120
    spool.close()
