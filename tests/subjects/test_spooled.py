"""A remote table is fetched once, whole, and then read like a local one."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from ghoststep.errors import CannotLook
from ghoststep.evidence.checkpoint import TensorInfo
from ghoststep.subjects import spooled
from ghoststep.subjects.spooled import SpooledRows


class RemoteStore:
    """Counts the bytes asked for."""

    def __init__(self, num_rows: int = 1000, row_bytes: int = 64) -> None:
        self.raw = np.random.default_rng(0).integers(0, 256, (num_rows, row_bytes), dtype=np.uint8)
        self.num_rows, self.row_bytes, self.num_dims = num_rows, row_bytes, row_bytes
        self.info = TensorInfo(name="embed", shape=self.raw.shape, dtype="f8_e5m2", file="m", num_bytes=self.raw.size)
        self.num_bytes, self.num_requests, self.fails = 0, 0, False
        self._lock = threading.Lock()

    def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        if self.fails:
            raise CannotLook("the connection broke")
        with self._lock:
            self.num_bytes += (stop - start) * self.row_bytes
            self.num_requests += 1
        return self.raw[start:stop]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooled, "_CHUNK_BYTES", 4096)


def test_each_byte_is_asked_for_once_whatever_is_read() -> None:
    remote = RemoteStore()
    store = SpooledRows(remote)
    assert remote.num_requests == 0  # nothing is fetched before somebody asks
    with ThreadPoolExecutor(8) as pool:
        starts = range(0, 997, 7)
        for start, block in zip(starts, pool.map(lambda s: store.raw_rows(s, s + 3), starts), strict=True):
            assert (block == remote.raw[start : start + 3]).all()
    assert (store.raw_rows(0, 1000) == remote.raw).all()
    assert remote.num_bytes == remote.raw.size
    assert remote.num_requests == 16


def test_two_looks_at_a_large_table_need_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooled, "_PEEK_TABLE_BYTES", 4096)
    remote = RemoteStore()
    store = SpooledRows(remote)
    for start in (0, 500):
        assert (store.raw_rows(start, start + 5) == remote.raw[start : start + 5]).all()
    assert remote.num_bytes == 10 * 64
    store.raw_rows(0, 5)  # the third question is no look any more
    assert remote.num_bytes == remote.raw.size + 10 * 64


def test_views_are_read_only() -> None:
    block = SpooledRows(RemoteStore()).raw_rows(3, 5)
    with pytest.raises(ValueError, match="read-only"):
        block[0, 0] = 1


def test_rows_outside_the_table_are_refused() -> None:
    with pytest.raises(CannotLook, match="asked for 999 to 1001"):
        SpooledRows(RemoteStore()).raw_rows(999, 1001)


def test_a_broken_connection_comes_through_and_may_be_tried_again() -> None:
    remote = RemoteStore()
    store = SpooledRows(remote)
    remote.fails = True
    with pytest.raises(CannotLook, match="connection broke"):
        store.raw_rows(0, 1)
    remote.fails = False
    assert (store.raw_rows(0, 1) == remote.raw[:1]).all()


def test_no_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(CannotLook, match=r"64000 bytes.*TMPDIR"):
        SpooledRows(RemoteStore()).raw_rows(0, 1)


@pytest.mark.parametrize(("num_rows", "row_bytes"), [(0, 64), (5, 0)])
def test_empty_tables(num_rows: int, row_bytes: int) -> None:
    assert SpooledRows(RemoteStore(num_rows, row_bytes)).raw_rows(0, num_rows).shape == (num_rows, row_bytes)
