"""A forward reader over `Source.read` for headers whose length is only known by reading them."""

from __future__ import annotations

from ghoststep.errors import CannotLook, UnsafeInput
from ghoststep.subjects.base import Source

_WINDOW_BYTES = 1 << 18


class WindowReader:
    """A file from its first byte, forward, in pieces of at least 256 KiB.

    No more than `limit_bytes` are read in all, and a piece that reaches past the end raises before anything is allocated:
    a length taken from the file costs nothing until the bytes are really there.
    """

    def __init__(self, source: Source, file: str, *, limit_bytes: int) -> None:
        self._source, self._file = source, file
        self._position = 0
        self._stop = source.size(file)
        self._limit_bytes = limit_bytes
        self._window: bytes = b""
        self._window_start = 0

    @property
    def remaining(self) -> int:
        """Bytes left up to the end."""
        return self._stop - self._position

    def tell(self) -> int:
        """Position in the file."""
        return self._position

    def read(self, num_bytes: int) -> bytes:
        """Exactly the next `num_bytes`; `CannotLook` past the end, `UnsafeInput` past the limit."""
        if num_bytes < 0 or num_bytes > self.remaining:
            raise CannotLook(
                f"{self._source.name}: {self._file} needs {num_bytes} bytes at {self._position}, "
                f"{max(self.remaining, 0)} are left: "
                "the file is truncated or its header lies. Download or save it again."
            )
        if self._position + num_bytes > self._limit_bytes:
            raise UnsafeInput(
                f"{self._source.name}: the header of {self._file} is longer than {self._limit_bytes} bytes; no real one is. "
                "It was not read further."
            )
        offset = self._position - self._window_start
        if not 0 <= offset <= len(self._window) - num_bytes:
            end = min(self._stop, self._position + max(num_bytes, _WINDOW_BYTES))
            self._window = bytes(self._source.read(self._file, self._position, end))
            self._window_start, offset = self._position, 0
        self._position += num_bytes
        return self._window[offset : offset + num_bytes]
