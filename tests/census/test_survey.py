"""One checkpoint → one record: each count right, and what cannot be known said."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ghoststep.census.record import Record, RowCounts, Status
from ghoststep.census.survey import Opened, open_watched, survey
from ghoststep.census.watched import Watched
from ghoststep.errors import CannotLook, SubjectError
from ghoststep.evidence.wiring import Tie
from ghoststep.registry import load
from ghoststep.subjects.checkpoint import Checkpoint
from tests.census.fleet import (
    ALIGNMENT,
    ATTENTION,
    BOS,
    LETTER_A,
    LETTER_B,
    MAMBA,
    MARKER,
    PARALLEL,
    PARTIAL,
    RESERVED,
    UNREACHABLE,
    Plan,
    files,
    write,
)
from tests.subjects.raw_files import MemorySource

INSTRUMENTS = load().instruments


def look(subject: Path | str, *, timeout_seconds: float | None = None, started: float | None = None) -> Record:
    opened = open_watched(
        str(subject),
        offline=True,
        timeout_seconds=timeout_seconds,
        started=time.monotonic() if started is None else started,
        stop=threading.Event(),
    )
    return survey(opened, INSTRUMENTS)


def test_a_healthy_checkpoint(tmp_path: Path) -> None:
    record = look(write(Plan(name="one"), tmp_path))
    assert record.status is Status.OK, record.reason
    assert (record.num_rows, record.num_dims, record.storage, record.tie) == (320, 8, "f32", Tie.UNTIED)
    assert record.near_zero == RowCounts()
    assert record.zero == RowCounts()
    assert (record.template_hits, record.identical_groups, record.nonfinite_rows) == (0, 0, 0)
    assert record.bytes_read > 320 * 8 * 4
    assert not record.examples


@pytest.mark.parametrize("wiring", [ATTENTION, MAMBA, PARALLEL])
@pytest.mark.parametrize("tied", [True, False])
def test_wiring_and_tie(tmp_path: Path, wiring: str, tied: bool) -> None:
    record = look(write(Plan(name="one", wiring=wiring, tied=tied), tmp_path))
    assert record.wiring is not None
    assert record.wiring.value == wiring
    assert record.tie is (Tie.TIED if tied else Tie.UNTIED)


def test_every_way_a_row_is_fed_is_counted_apart(tmp_path: Path) -> None:
    near = (LETTER_A, BOS, MARKER, PARTIAL, PARTIAL + 1, RESERVED, UNREACHABLE, ALIGNMENT)
    plan = Plan(name="one", wiring=MAMBA, near=near, zero=(LETTER_B, ALIGNMENT + 1), with_template=True)
    record = look(write(plan, tmp_path))
    assert record.status is Status.OK, record.reason
    assert record.near_zero == RowCounts(raw=8, reachable=3, undetermined=2, reserved=1, unreachable=1, no_token=1)
    assert record.zero == RowCounts(raw=2, reachable=1, no_token=1)
    assert record.template_hits == 1
    assert record.num_reachable == 4
    assert next(e.table_row for e in record.examples) == LETTER_B  # the zero row first
    assert record.examples[0].norm == 0.0


def test_the_line_is_the_effective_norm(tmp_path: Path) -> None:
    above = Plan(name="above", near=(LETTER_A,), norm=1.5e-6)
    below = Plan(name="below", near=(LETTER_A,), norm=0.5e-6)
    lifted = Plan(name="lifted", near=(LETTER_A,), norm=0.5e-6, config={"embedding_multiplier": 12.0})
    found = [look(write(plan, tmp_path)).near_zero for plan in (above, below, lifted)]
    assert [counts.raw if counts else None for counts in found] == [0, 1, 0]
    assert look(tmp_path / "lifted").multiplier == 12.0


def test_no_tokenizer_is_unknown_only_where_it_matters(tmp_path: Path) -> None:
    assert look(write(Plan(name="healthy", with_tokenizer=False), tmp_path)).status is Status.OK
    record = look(write(Plan(name="ill", near=(LETTER_A,), with_tokenizer=False), tmp_path))
    assert record.status is Status.PARTIAL
    assert record.near_zero == RowCounts(raw=1, unknown=1)
    assert record.reason is not None
    assert "no tokenizer file" in record.reason
    assert not record.retry


def test_the_padding_row_needs_no_tokenizer(tmp_path: Path) -> None:
    plan = Plan(name="padded", zero=(0,), with_tokenizer=False, config={"pad_token_id": 0})
    record = look(write(plan, tmp_path))
    assert record.zero == RowCounts(raw=1, unreachable=1)
    assert record.status is Status.OK


def test_a_table_that_is_tiny_as_a_whole_is_not_called_clear(tmp_path: Path) -> None:
    plan = Plan(name="tiny", near=tuple(range(320)), norm=1e-9)
    folder = write(plan, tmp_path)
    record = look(folder)
    assert record.near_zero is not None
    assert record.near_zero.raw == 320
    assert record.near_zero.reachable > 0 or record.near_zero.unknown > 0


def test_time_is_up(tmp_path: Path) -> None:
    record = look(write(Plan(name="one"), tmp_path), timeout_seconds=5.0, started=time.monotonic() - 10)
    assert record.status is Status.FAILED
    assert record.retry
    assert record.reason is not None
    assert "out of time" in record.reason


class Slow(MemorySource):
    """Every read takes a fifth of a second."""

    def read(self, file: str, start: int, stop: int) -> bytes:
        time.sleep(0.2)
        return super().read(file, start, stop)


def test_in_a_thread_a_measurement_ends_at_its_next_read() -> None:
    stop = threading.Event()
    plan = Plan(name="one")
    source = Watched(Slow(files(plan)), timeout_seconds=0.3, started=time.monotonic(), stop=stop)
    opened = Opened(checkpoint=Checkpoint(source), watched=source, subject="one", name="one", revision=None, key="one")
    found: list[Record] = []
    worker = threading.Thread(target=lambda: found.append(survey(opened, INSTRUMENTS)))
    started = time.monotonic()
    worker.start()
    worker.join()
    assert time.monotonic() - started < 3
    assert found[0].status is Status.FAILED
    assert found[0].reason is not None
    assert "out of time" in found[0].reason
    assert found[0].retry


@pytest.mark.parametrize("whole", [True, False])
def test_the_watch(whole: bool) -> None:
    stop = threading.Event()

    def read(watched: Watched) -> object:
        return watched.read_whole("x", limit_bytes=9) if whole else watched.read("x", 0, 3)

    source = MemorySource({"x": b"abc"})
    free = Watched(source, timeout_seconds=None, started=0.0, stop=stop)
    assert read(free) == b"abc"
    assert (free.bytes_read, free.was_cut_short, free.remaining_seconds) == (3, False, None)
    late = Watched(source, timeout_seconds=5.0, started=time.monotonic() - 6, stop=stop)
    with pytest.raises(CannotLook, match="out of time: --timeout 5 s passed while x was read"):
        read(late)
    assert late.was_cut_short
    stop.set()
    with pytest.raises(CannotLook, match="stopped"):
        read(free)


def test_equal_tables_have_equal_fingerprints_whatever_lies_around_them(tmp_path: Path) -> None:
    first = look(write(Plan(name="a", seed=1), tmp_path)).fingerprint
    assert first is not None
    assert look(write(Plan(name="b", seed=1, wiring=MAMBA, tied=True), tmp_path)).fingerprint == first
    assert look(write(Plan(name="c", seed=2), tmp_path)).fingerprint != first
    assert look(write(Plan(name="d", seed=1, near=(ALIGNMENT,)), tmp_path)).fingerprint != first


def test_the_key_follows_the_files(tmp_path: Path) -> None:
    def key() -> str:
        return open_watched(str(tmp_path / "a"), offline=True, timeout_seconds=None, started=0.0, stop=threading.Event()).key

    write(Plan(name="a"), tmp_path)
    before = key()
    assert key() == before
    write(Plan(name="a", config={"pad_token_id": 0}), tmp_path)
    assert key() != before


def test_what_cannot_be_opened_raises(tmp_path: Path) -> None:
    with pytest.raises(SubjectError, match="does not exist"):
        look(tmp_path / "absent")


def test_hidden_characters_in_names_are_shown(tmp_path: Path) -> None:
    record = look(write(Plan(name="evil\x1b[31m", near=(LETTER_A,)), tmp_path))
    assert "\\x1b[31m" in record.name
    assert "\x1b" not in repr(record)
