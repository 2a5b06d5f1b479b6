"""Frames: what a run's record consists of on disk. Written at once, read with suspicion.

A segment file is a row of frames and nothing else. A frame is a header of 16 bytes (magic, number of the frame in its segment, length,
CRC-32 of the three and the content; little-endian), then the content: zlib of the msgpack array [kind, data]. zlib adds a sum of its
own over the inflated bytes. A file that was cut off anywhere still gives every frame before the cut.

What comes from a stranger is bounded before memory is taken: the stored length of a frame, what it inflates to, and the length of a
segment. Damage never raises: the reader stops, and says where and why.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

MAGIC = b"GSF1"
MAX_INFLATED_BYTES = 4 << 20
"""Of one frame. Python objects made of hostile msgpack can take about thirty times as much, for as long as the frame is looked at."""

MAX_FRAME_BYTES = MAX_INFLATED_BYTES + (1 << 16)
SEGMENT_BYTES = 8 << 20
"""A writer starts a new segment before one grows beyond this."""

MAX_SEGMENT_BYTES = 8 * SEGMENT_BYTES
MAX_SEGMENT_INFLATED_BYTES = 64 * SEGMENT_BYTES

STEPS, GAP, EVENT, CLOSED = "steps", "gap", "event", "closed"
"""Kinds of frames. A reader passes over kinds that it does not know."""

_READ_FLAGS: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_HEADER = struct.Struct("<4sIII")
_HEAD = struct.Struct("<4sII")
_ENVELOPE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One whole frame. `data` is msgpack whose bytes are those that were written; what it holds is not looked at yet."""

    kind: str
    data: bytes
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Where reading a segment ended early. is_torn: the file just ends there (killed while writing, or written right now)."""

    at: int
    reason: str
    is_torn: bool = False


class FrameTooLargeError(ValueError):
    """More than a reader would accept; to be written in smaller pieces."""


def _plain(value: object) -> Any:
    """What msgpack has no word for: numpy and torch scalars as numbers, other mappings as dictionaries, the rest as text."""
    if isinstance(value, Mapping):
        return dict(value)
    item = getattr(value, "item", None)
    return item() if callable(item) else repr(value)[:1000]


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def _tamed(value: Any) -> Any:
    """Strings that are no UTF-8 (lone surrogates) escaped, whole numbers that do not fit 64 bits as floats."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_tamed(k): _tamed(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_tamed(v) for v in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return float(value)
    return value


def plain_data(data: object) -> Any:
    """`data` as dictionaries, lists, strings, numbers and bytes, all of which can be written."""
    return _tamed(msgspec.to_builtins(data, builtin_types=(bytes,), enc_hook=_plain))


def encode_frame(kind: str, data: object, *, number: int, level: int = 1) -> bytes:
    """A whole frame. Dataclasses become maps by field name, so that a later version may add fields.

    `FrameTooLargeError` beyond `MAX_INFLATED_BYTES`. level: of zlib; 0 where the content does not get smaller (norms).
    """
    try:
        raw = _ENCODER.encode((kind, data))
    except (UnicodeEncodeError, OverflowError):
        raw = _ENCODER.encode((kind, plain_data(data)))
    if len(raw) > MAX_INFLATED_BYTES:
        raise FrameTooLargeError(f"{len(raw)} bytes, a frame holds at most {MAX_INFLATED_BYTES}")
    content = zlib.compress(raw, level)
    head = _HEAD.pack(MAGIC, number, len(content))
    return b"".join((head, zlib.crc32(content, zlib.crc32(head)).to_bytes(4, "little"), content))


def open_regular(path: Path) -> int:
    """A descriptor for reading. `OSError` unless it is a regular file: a link, a pipe or a device of a stranger's folder is not
    followed and cannot hang the reader."""
    descriptor = os.open(path, os.O_RDONLY | _READ_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "no regular file")
    return descriptor


class SegmentReader:
    """The frames of one segment, in order, once. Afterwards `damage` says where and why it ended early, None if it did not.

    Memory: one frame. Never raises for what the file holds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: Damage | None = None

    def __iter__(self) -> Iterator[Frame]:
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                yield from self._frames(file)
        except OSError as error:
            self.damage = Damage(at=0, reason=f"cannot be read: {error.strerror or error}")

    def _frames(self, file: IO[bytes]) -> Iterator[Frame]:
        number = at = inflated = 0
        while header := file.read(_HEADER.size):
            if at + len(header) > MAX_SEGMENT_BYTES:
                self.damage = Damage(at=at, reason=f"longer than any segment that is written ({MAX_SEGMENT_BYTES} bytes)")
                return
            found = self._frame(file, header, number, at)
            if isinstance(found, Damage):
                self.damage = found
                return
            content, raw = found
            inflated += len(raw)
            if inflated > MAX_SEGMENT_INFLATED_BYTES:
                self.damage = Damage(at=at, reason=f"its frames inflate to more than {MAX_SEGMENT_INFLATED_BYTES} bytes")
                return
            try:
                kind, data = _ENVELOPE.decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.damage = Damage(at=at, reason="its content is no pair of kind and data")
                return
            yield Frame(kind=kind, data=bytes(data), at=at)
            number, at = number + 1, at + len(header) + len(content)

    def _frame(self, file: IO[bytes], header: bytes, number: int, at: int) -> tuple[bytes, bytes] | Damage:
        """Content as stored and inflated of the frame whose header this is, or what is wrong with it."""
        if len(header) < _HEADER.size:
            return Damage(at=at, reason="it ends within the header of a frame", is_torn=True)
        magic, said_number, length, checksum = _HEADER.unpack(header)
        if magic != MAGIC:
            return Damage(at=at, reason="no frame begins here")
        if said_number != number:
            return Damage(at=at, reason=f"frame {said_number} where frame {number} belongs")
        if length > MAX_FRAME_BYTES:
            return Damage(at=at, reason=f"a frame of {length} bytes, at most {MAX_FRAME_BYTES} are written")
        content = file.read(length)
        if len(content) < length:
            return Damage(at=at, reason="it ends within a frame", is_torn=True)
        if zlib.crc32(content, zlib.crc32(header[: _HEAD.size])) != checksum:
            return Damage(at=at, reason="the checksum of a frame differs")
        raw = _inflated(content)
        return Damage(at=at, reason=raw) if isinstance(raw, str) else (content, raw)


def _inflated(content: bytes) -> bytes | str:
    """The inflated bytes, or why there are none. Never makes more than `MAX_INFLATED_BYTES` of them."""
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(content, MAX_INFLATED_BYTES + 1)
    except zlib.error:
        return "a frame does not inflate"
    if len(raw) > MAX_INFLATED_BYTES:
        return f"a frame inflates to more than {MAX_INFLATED_BYTES} bytes"
    if not inflater.eof or inflater.unused_data:
        return "a frame does not inflate to its end"
    return raw
