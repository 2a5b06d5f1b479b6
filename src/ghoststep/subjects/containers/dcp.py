"""Torch distributed checkpoints: `.metadata` describes tensors and their chunks, `*.distcp` files hold the chunks.

`.metadata` is a pickle. It is described by `pickle_reader`, never executed, and may mention only the classes of `_ALLOWED`.
Each chunk is a small file of `torch.save` inside a `.distcp` file; its rows are read where they stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook, UnsafeInput
from ghoststep.evidence.checkpoint import TensorInfo
from ghoststep.subjects.base import RowStore, Source
from ghoststep.subjects.containers.base import Layout, brief, check_range, find, num_elements, require_matrix, rows_of
from ghoststep.subjects.containers.pickle_reader import Call, Name, read_pickle
from ghoststep.subjects.containers.torch_archive import MAX_PICKLE_BYTES, read_archive
from ghoststep.subjects.containers.torch_file import check_storage
from ghoststep.subjects.containers.torch_pickle import DTYPES, is_known, single_tensor, sizes_of
from ghoststep.subjects.local import check_relative_name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

METADATA_FILE = ".metadata"
_MAX_CHUNKS = 4096
_MODULE = "torch.distributed.checkpoint"
_ALLOWED = frozenset(
    f"{_MODULE}.metadata.{name}"
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
) | {
    f"{_MODULE}.filesystem._StorageInfo",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
}
"""The classes `.metadata` may mention, beside those of every torch file (`is_known`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One stored piece of a tensor: its corner and sizes, and [start, stop) of its archive in `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    stop: int


class DistributedCheckpoint:
    """A folder of `torch.distributed.checkpoint.save`. Raises `CannotLook` or `UnsafeInput` at construction."""

    format = "torch distributed checkpoint"

    def __init__(self, source: Source, file: str = METADATA_FILE) -> None:
        self._source = source
        self._place = f"{source.name}: {file}"
        self._folder = file.rpartition("/")[0]
        data = source.read_whole(file, limit_bytes=MAX_PICKLE_BYTES)
        value, _ = read_pickle(data, allowed=lambda name: is_known(name) or str(name) in _ALLOWED, place=self._place)
        described, stored = _fields(value, "Metadata", self._place, "state_dict_metadata", "storage_data")
        if not isinstance(described, dict) or not isinstance(stored, dict):
            raise CannotLook(f"{self._place} lists no tensors or no files: it was not written by torch's own file writer.")
        self._places = self._read_places(stored)
        self._tensors: dict[str, TensorInfo] = {}
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        self._item_bits: dict[str, int] = {}
        for name, entry in described.items():
            if isinstance(name, str) and isinstance(entry, Call) and entry.target.attribute == "TensorStorageMetadata":
                self._add(name, entry)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor with its full shape; `file` is that of its first chunk."""
        return self._tensors

    @property
    def metadata(self) -> Mapping[str, object]:
        """None in this format: {}."""
        return {}

    def rows(self, name: str) -> RowStore:
        """Raw rows of a matrix, put together from its chunks (a view where one chunk holds all asked for)."""
        info = find(self._tensors, name)
        num_rows, num_dims = require_matrix(info)
        chunks = self._chunks[name]
        if not _tile(chunks, info.shape):
            raise CannotLook(f"{self._place}: the {len(chunks)} chunks of {name!r} do not cover {list(info.shape)} exactly.")
        pieces = tuple(self._piece(info, chunk) for chunk in chunks)
        row_bytes = num_dims * self._item_bits[name] // 8
        return ChunkedRows(info=info, num_rows=num_rows, num_dims=num_dims, row_bytes=row_bytes, pieces=pieces)

    def _piece(self, info: TensorInfo, chunk: Chunk) -> Piece:
        """A chunk with its rows, read from the small archive that it is."""
        place = f"{self._source.name}: {chunk.file}"
        if chunk.file not in self._source.files():
            raise CannotLook(f"{place} is missing; it holds a part of {info.name!r}. Copy it into the folder.")
        if chunk.stop > self._source.size(chunk.file):
            raise CannotLook(
                f"{place} ends before the part of {info.name!r} that it should hold: it is truncated. Copy it again."
            )
        archive = read_archive(self._source, chunk.file, start=chunk.start, stop=chunk.stop)
        record = single_tensor(archive.value, info.name, place)
        if record.shape != chunk.sizes or record.dtype != info.dtype or record.unreadable is not None:
            raise UnsafeInput(
                f"{place}: the part of {info.name!r} has shape {brief(record.shape)} and dtype {record.dtype}, .metadata says "
                f"{brief(chunk.sizes)} and {info.dtype}. The files belong to different saves."
            )
        check_storage(archive, record, place)
        start = archive.start_of(record.key) + record.offset * record.item_bits // 8
        part = TensorInfo(
            name=info.name,
            shape=record.shape,
            dtype=record.dtype,
            file=chunk.file,
            num_bytes=num_elements(record.shape) * record.item_bits // 8,
        )
        layout = Layout(start=start, strides=record.strides)
        first_byte = chunk.offsets[1] * record.item_bits // 8
        return Piece(
            first_row=chunk.offsets[0], first_byte=first_byte, rows=rows_of(self._source, part, layout, record.item_bits)
        )

    def _add(self, name: str, entry: Call) -> None:
        properties, size, chunks = _fields(entry, "TensorStorageMetadata", self._place, "properties", "size", "chunks")
        shape = sizes_of(size)
        state = properties.state if isinstance(properties, Call) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if shape is None or not isinstance(dtype, Name) or dtype.attribute not in DTYPES or not isinstance(chunks, list):
            raise UnsafeInput(f"{self._place}: tensor {name[:80]!r} has no valid shape, dtype or chunks.")
        found = []
        for chunk in chunks:
            offsets, sizes = (
                sizes_of(field) for field in _fields(chunk, "ChunkStorageMetadata", self._place, "offsets", "sizes")
            )
            if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
                raise UnsafeInput(f"{self._place}: tensor {name[:80]!r} has a chunk without valid offsets and sizes.")
            at = self._places.get((name, offsets))
            if at is None:
                raise CannotLook(f"{self._place}: a chunk of {name[:80]!r} stands in no file: the save did not finish.")
            found.append(Chunk(offsets=offsets, sizes=sizes, file=at[0], start=at[1], stop=at[2]))
        label, self._item_bits[name] = DTYPES[dtype.attribute]
        self._chunks[name] = tuple(sorted(found, key=lambda chunk: chunk.offsets))
        self._tensors[name] = TensorInfo(
            name=name,
            shape=shape,
            dtype=label,
            file=self._chunks[name][0].file if found else METADATA_FILE,
            num_bytes=num_elements(shape) * self._item_bits[name] // 8,
        )

    def _read_places(self, stored: Mapping[object, object]) -> Mapping[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
        """(tensor, offsets of a chunk) → (file, start, stop)."""
        places = {}
        for index, info in stored.items():
            name, offset = _fields(index, "MetadataIndex", self._place, "fqn", "offset")
            path, start, length = _fields(info, "_StorageInfo", self._place, "relative_path", "offset", "length")
            if offset is None:
                continue  # an object that is no tensor
            if isinstance(info, Call) and isinstance(info.state, dict) and info.state.get("transform_descriptors"):
                raise CannotLook(
                    f"{self._place}: its chunks are compressed, which is not supported. Save it without extensions."
                )
            corner, span = sizes_of(offset), sizes_of((start, length))
            if not isinstance(name, str) or not isinstance(path, str) or corner is None or span is None:
                raise UnsafeInput(f"{self._place}: an entry for {brief(name)} has no valid place.")
            check_relative_name(path, where=self._place)
            file = f"{self._folder}/{path}" if self._folder else path
            places[name, corner] = (file, span[0], span[0] + span[1])
        return places


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A rectangle of a matrix: its first table row, its first byte in a row, and its own rows."""

    first_row: int
    first_byte: int
    rows: RowStore


@dataclass(slots=True, kw_only=True, eq=False)
class ChunkedRows:
    """Rows put together from rectangles that tile the matrix."""

    info: TensorInfo
    num_rows: int
    num_dims: int
    row_bytes: int
    pieces: tuple[Piece, ...]

    def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows [start, stop): uint8 [stop - start, row_bytes]; a view if one full-width chunk holds them, else a copy."""
        import numpy as np

        check_range(start, stop, self.num_rows)
        block = np.zeros((0, self.row_bytes), dtype=np.uint8) if start == stop else None
        for piece in self.pieces:
            first, last = max(start, piece.first_row), min(stop, piece.first_row + piece.rows.num_rows)
            if first >= last:
                continue
            part = piece.rows.raw_rows(first - piece.first_row, last - piece.first_row)
            if part.shape == (stop - start, self.row_bytes):
                return part
            if block is None:
                block = np.zeros((stop - start, self.row_bytes), dtype=np.uint8)
            block[first - start : last - start, piece.first_byte : piece.first_byte + part.shape[1]] = part
        if block is None:  # rows without dimensions
            block = np.zeros((stop - start, self.row_bytes), dtype=np.uint8)
        block.flags.writeable = False
        return block


def _tile(chunks: tuple[Chunk, ...], shape: tuple[int, ...]) -> bool:
    """True if the rectangles lie inside the matrix, share nothing and leave nothing out."""
    if len(chunks) > _MAX_CHUNKS:
        return False
    for position, chunk in enumerate(chunks):
        if any(offset + size > whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            return False
        if any(_overlap(chunk, other) for other in chunks[position + 1 :]):
            return False
    return sum(num_elements(chunk.sizes) for chunk in chunks) == num_elements(shape)


def _overlap(one: Chunk, other: Chunk) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(max(a, b) < min(a + a_size, b + b_size) for a, a_size, b, b_size in sides)


def _fields(value: object, kind: str, place: str, *names: str) -> tuple[object, ...]:
    """The named fields of an object of the class `kind` (None where absent)."""
    if not isinstance(value, Call) or value.target.attribute != kind or not isinstance(value.state, dict):
        raise CannotLook(f"{place} does not look like the metadata of torch.distributed.checkpoint: expected a {kind}.")
    return tuple(value.state.get(name) for name in names)
