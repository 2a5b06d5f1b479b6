"""A table behind a network, fetched once into a temporary file and then read like a local one.

Measurements come back to some rows (a sample before the pass, candidates after it); asked over HTTP each would be a request
of its own, and the bytes would be paid for twice.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ghoststep.subjects.base import RowStore

_CHUNK_BYTES = 8 << 20
_NUM_CONNECTIONS = 4
_MAX_PEEKS = 2
_PEEK_TABLE_BYTES = 8 << 20


class SpooledRows:
    """A `RowStore` over a copy of another store's bytes, made at the first question and deleted with this object.

    The first two questions for less than a hundredth of a table of more than 8 MB are passed on instead: comparing two tables
    ends at the first block as a rule, and needs no copy. After that each byte is asked for once, in ascending pieces of about 8 MB over
    four connections. Threads may ask at once: all wait
    for the one copy. `CannotLook` when the temporary folder has no room; an error of the store itself comes through, and the
    next question tries again. Memory: the pieces in flight; the copy is mapped.
    """

    def __init__(self, store: RowStore) -> None:
        self.info = store.info
        self.num_rows = store.num_rows
        self.num_dims = store.num_dims
        self.row_bytes = store.row_bytes
        self._store = store
        self._lock = threading.Lock()
        self._copy: NDArray[np.uint8] | None = None
        self._num_peeks = 0

    def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows [start, stop): a read-only view uint8 [stop - start, row_bytes] of the copy."""
        if self._store.num_rows * self.row_bytes == 0:
            return self._store.raw_rows(start, stop)
        with self._lock:
            if self._copy is None and self._is_a_peek(start, stop):
                self._num_peeks += 1
                return self._store.raw_rows(start, stop)
            if self._copy is None:
                self._copy = self._fetch()
        if not 0 <= start <= stop <= self.num_rows:
            raise CannotLook(f"{self.info.name} has {self.num_rows} table rows, asked for {start} to {stop}")
        return self._copy[start:stop]

    def _is_a_peek(self, start: int, stop: int) -> bool:
        is_large = self.num_rows * self.row_bytes > _PEEK_TABLE_BYTES
        return is_large and self._num_peeks < _MAX_PEEKS and (stop - start) * 100 < self.num_rows

    def _fetch(self) -> NDArray[np.uint8]:
        import numpy as np

        try:
            with tempfile.TemporaryFile(prefix="ghoststep-") as file:
                file.truncate(self.num_rows * self.row_bytes)
                # The map keeps the nameless file alive after this handle is closed; the system frees it with the map.
                shared = np.memmap(file, dtype=np.uint8, mode="r+", shape=(self.num_rows, self.row_bytes))
                rows_at_once = max(1, _CHUNK_BYTES // self.row_bytes)
                starts = iter(range(0, self.num_rows, rows_at_once))  # shared: `next` is atomic
                with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
                    jobs = [
                        pool.submit(self._fill, shared, starts, rows_at_once, file.fileno()) for _ in range(_NUM_CONNECTIONS)
                    ]
                    for job in jobs:
                        job.result()
                shared.flags.writeable = False
                return shared
        except OSError as error:
            raise CannotLook(
                f"{self.info.name}: its {self.num_rows * self.row_bytes} bytes do not fit into the temporary folder "
                f"{tempfile.gettempdir()} ({error}). Free some space or point TMPDIR elsewhere."
            ) from error

    def _fill(self, shared: NDArray[np.uint8], starts: Iterator[int], rows_at_once: int, handle: int) -> None:
        for start in starts:
            stop = min(start + rows_at_once, self.num_rows)
            block = self._store.raw_rows(start, stop)
            if not hasattr(os, "pwrite"):
                shared[start:stop] = block
                continue
            # Written, not stored through the map: a full disk is then an error to report, not a SIGBUS.
            rest, at = memoryview(block.tobytes()), start * self.row_bytes
            while rest:
                written = os.pwrite(handle, rest, at)
                rest, at = rest[written:], at + written
