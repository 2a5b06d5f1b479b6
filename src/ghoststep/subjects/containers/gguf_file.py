"""GGUF: key-values and tensor descriptions in front, blocks of quantised values behind.

Read by our own bounded parser: `gguf.GGUFReader` needs a local file and believes the counts of the header (measured: 80 bytes
that claim an array of 2^34 items took 1.2 GB in 8 s, and more). Every count here is held against the bytes that are left
before anything is built, so memory stays within a small multiple of the header.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from ghoststep.errors import CannotLook, UnsafeInput
from ghoststep.evidence.checkpoint import TensorInfo
from ghoststep.subjects.base import RowStore, Source
from ghoststep.subjects.containers.base import (
    MAX_DIMENSION,
    BlockRows,
    Header,
    brief,
    find,
    join_headers,
    num_elements,
    require_matrix,
)
from ghoststep.subjects.containers.gguf_types import GGML_TYPES
from ghoststep.subjects.containers.window import WindowReader

GGUF_MAGIC = b"GGUF"
MAX_HEADER_BYTES = 256 << 20
_MAX_STRING_BYTES = 1 << 24
_MAX_ARRAY_ITEMS = 1 << 22
_MAX_ALIGNMENT = 1 << 16
_TENSOR_BYTES = 32
_PAIR_BYTES = 13

_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class GgufFiles:
    """One GGUF file, or the parts of a split one, read as one checkpoint."""

    format = "gguf"

    def __init__(self, source: Source, files: Iterable[str]) -> None:
        self._source = source
        self._header = join_headers((read_gguf_header(source, file) for file in files), source.name)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of every part; shapes in the usual order [table rows, dimensions]."""
        return self._header.tensors

    @property
    def metadata(self) -> Mapping[str, object]:
        """The key-values, token lists included."""
        return self._header.metadata

    def rows(self, name: str) -> RowStore:
        """Raw rows of a stored matrix: whole blocks of its quantisation."""
        info = find(self._header.tensors, name)
        num_rows, num_dims = require_matrix(info)
        row_bytes = info.num_bytes // num_rows if num_rows else 0
        return BlockRows(
            info=info,
            num_rows=num_rows,
            num_dims=num_dims,
            row_bytes=row_bytes,
            source=self._source,
            start=self._header.starts[name],
        )


def read_gguf_header(source: Source, file: str) -> Header:
    """Parse and validate the header of one file; `UnsafeInput` when it lies, `CannotLook` when it is cut short or too old.

    Strings of arrays are str (undecodable bytes replaced), arrays are tuples.
    """
    return _Parser(source, file).header()


class _Parser:
    """One pass over the header, forward."""

    def __init__(self, source: Source, file: str) -> None:
        self._place = f"{source.name}: {file}"
        self._file = file
        self._size = source.size(file)
        self._reader = WindowReader(source, file, limit_bytes=MAX_HEADER_BYTES)

    def header(self) -> Header:
        if self._reader.read(4) != GGUF_MAGIC:
            raise CannotLook(f"{self._place} does not start with GGUF. Download or save it again.")
        (version,) = self._unpack("I")
        if version not in (2, 3):
            raise CannotLook(f"{self._place} is GGUF version {version}, expected 2 or 3 (little-endian). Convert it anew.")
        num_tensors, num_pairs = self._unpack("QQ")
        self._check_count(num_tensors, _TENSOR_BYTES, "tensors")
        self._check_count(num_pairs, _PAIR_BYTES, "key-values")
        metadata: dict[str, object] = {}
        for _ in range(num_pairs):
            key = self._string()
            (kind,) = self._unpack("I")
            if key in metadata:
                raise UnsafeInput(f"{self._place}: the key {key[:80]!r} stands there twice.")
            metadata[key] = self._value(kind)
        described = [self._tensor() for _ in range(num_tensors)]
        data_start = self._data_start(metadata)
        tensors, starts = {}, {}
        for info, offset in described:
            if info.name in tensors:
                raise UnsafeInput(f"{self._place}: the tensor {info.name[:80]!r} stands there twice.")
            tensors[info.name], starts[info.name] = info, data_start + offset
        self._check_places(tensors, starts)
        return Header(metadata=metadata, tensors=tensors, starts=starts)

    def _unpack(self, codes: str) -> tuple[int, ...]:
        return struct.unpack(f"<{codes}", self._reader.read(struct.calcsize(f"<{codes}")))

    def _check_count(self, count: int, item_bytes: int, what: str) -> None:
        if count * item_bytes > self._reader.remaining:
            raise UnsafeInput(
                f"{self._place} says that it has {count} {what}, more than its {self._size} bytes can hold: it is truncated or "
                "made to exhaust memory. Download it again."
            )

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        if length > _MAX_STRING_BYTES:
            raise UnsafeInput(f"{self._place} has a string of {length} bytes in its header, more than {_MAX_STRING_BYTES}.")
        return self._reader.read(length).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0]
        item_kind, count = self._unpack("IQ")
        if count > _MAX_ARRAY_ITEMS:
            raise UnsafeInput(f"{self._place} has an array of {count} items in its header, more than {_MAX_ARRAY_ITEMS}.")
        if item_kind == _ARRAY:
            raise UnsafeInput(f"{self._place} nests arrays in its header; no GGUF writer does.")
        if item_kind == _STRING:
            self._check_count(count, 8, "strings in an array")
            return tuple(self._string() for _ in range(count))
        return self._numbers(item_kind, count)

    def _numbers(self, kind: int, count: int) -> tuple[int | float | bool, ...]:
        code = _SCALARS.get(kind)
        if code is None:
            raise UnsafeInput(f"{self._place} has a value of type {kind} in its header; types 0 to 12 exist.")
        item_bytes = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{count}{code}", self._reader.read(count * item_bytes))

    def _tensor(self) -> tuple[TensorInfo, int]:
        """One description: name, sizes (innermost first), type and offset from the start of the data."""
        name = self._string()
        (num_dims,) = self._unpack("I")
        if num_dims > 4:
            raise UnsafeInput(f"{self._place}: tensor {name[:80]!r} has {num_dims} dimensions, GGUF allows 4.")
        sizes = self._unpack("Q" * num_dims)
        kind, offset = self._unpack("IQ")
        shape = tuple(reversed(sizes))
        if any(size > MAX_DIMENSION for size in shape) or offset > MAX_DIMENSION:
            raise UnsafeInput(f"{self._place}: tensor {name[:80]!r} has sizes {brief(shape)} at {offset}: its header lies.")
        if kind not in GGML_TYPES:
            raise CannotLook(
                f"{self._place}: tensor {name[:80]!r} has type {kind}, which is not known here (up to "
                f"{max(GGML_TYPES)}). Convert the "
                "model to another type, or upgrade ghoststep."
            )
        dtype, block_items, block_bytes = GGML_TYPES[kind]
        if shape and shape[-1] % block_items:
            raise UnsafeInput(
                f"{self._place}: {name[:80]!r} has {shape[-1]} values a row, {dtype} needs a multiple of {block_items}."
            )
        num_bytes = num_elements(shape) // block_items * block_bytes
        return TensorInfo(name=name, shape=shape, dtype=dtype, file=self._file, num_bytes=num_bytes), offset

    def _data_start(self, metadata: Mapping[str, object]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise UnsafeInput(f"{self._place}: general.alignment is {brief(alignment)}, expected a power of two up to 65536.")
        return -(-self._reader.tell() // alignment) * alignment

    def _check_places(self, tensors: Mapping[str, TensorInfo], starts: Mapping[str, int]) -> None:
        end, before = 0, "the header"
        for name in sorted(tensors, key=lambda name: (starts[name], tensors[name].num_bytes)):
            if starts[name] < end:
                raise UnsafeInput(
                    f"{self._place}: tensor {name[:80]!r} overlaps {before[:80]!r}. No GGUF writer makes such a file."
                )
            end, before = starts[name] + tensors[name].num_bytes, name
            if end > self._size:
                raise CannotLook(
                    f"{self._place}: tensor {name[:80]!r} ends at byte {end}, the file at {self._size}: it is truncated or its "
                    "header lies. Download or save it again."
                )
