"""Safetensors: 8 bytes header length, a JSON header, then the data. Read from the header alone.

The header is held against the rules of the format before anything believes it: length, JSON, dtypes, sizes, offsets that
cover the data without overlap or gap. A hostile header costs at most about 40 bytes of memory for each byte that it really
has (at most 100 MB); a length that it only claims costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TypeGuard

from ghoststep.errors import CannotLook, UnsafeInput
from ghoststep.evidence.checkpoint import TensorInfo
from ghoststep.subjects.base import RowStore, Source
from ghoststep.subjects.containers.base import MAX_DIMENSION, Header, Layout, brief, find, join_headers, num_elements, rows_of

MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 64
LFS_POINTER = b"version https://git-lfs"

ITEM_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


class SafetensorsFiles:
    """One or several safetensors files read as one checkpoint. Raises at construction what `read_header` raises."""

    format = "safetensors"

    def __init__(self, source: Source, files: Iterable[str]) -> None:
        self._source = source
        self._header = join_headers((read_header(source, file) for file in files), source.name)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of every file."""
        return self._header.tensors

    @property
    def metadata(self) -> Mapping[str, object]:
        """`__metadata__` of the files, earlier files over later ones."""
        return self._header.metadata

    def rows(self, name: str) -> RowStore:
        """Raw rows of a stored matrix."""
        info = find(self._header.tensors, name)
        return rows_of(self._source, info, Layout(start=self._header.starts[name]), ITEM_BITS[info.dtype.upper()])


def read_header(source: Source, file: str) -> Header:
    """Parse and validate the header of one file.

    `UnsafeInput` when the header breaks the format's rules, `CannotLook` when the file is cut short or is a Git LFS pointer.
    Cost: two small reads.
    """
    place = f"{source.name}: {file}"
    size = source.size(file)
    if size < 8:
        raise CannotLook(
            f"{place} has {size} bytes: too short for a safetensors file. It is truncated: download or save it again."
        )
    length = int.from_bytes(source.read(file, 0, 8), "little")
    if length > size - 8 or length > MAX_HEADER_BYTES:
        if bytes(source.read(file, 0, min(size, len(LFS_POINTER)))) == LFS_POINTER:
            raise CannotLook(f"{place} is a Git LFS pointer, not the weights: run `git lfs pull` in that folder.")
        raise UnsafeInput(
            f"{place} says that its header has {length} bytes; the file has {size} and {MAX_HEADER_BYTES} is "
            "the most the format "
            "allows. The file is truncated, not safetensors, or made to exhaust memory: download it again."
        )
    entries = _parse_json(bytes(source.read(file, 8, 8 + length)), place)
    metadata = _metadata(entries.pop("__metadata__", {}), place)
    tensors, starts = {}, {}
    for name, entry in entries.items():
        info, begin = _tensor(name, entry, file, size - 8 - length, place)
        tensors[name], starts[name] = info, 8 + length + begin
    _check_coverage(tensors, starts, first=8 + length, size=size, place=place)
    return Header(tensors=tensors, starts=starts, metadata=metadata)


def _parse_json(header: bytes, place: str) -> dict[str, object]:
    try:
        parsed = json.loads(header.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError, MemoryError) as error:  # ValueError: bad UTF-8, bad JSON, duplicates, endless integers
        why = "nests too deeply" if isinstance(error, RecursionError) else str(error)[:200] or type(error).__name__
        raise UnsafeInput(f"{place}: its header is not the JSON object of a safetensors file ({why}).") from None
    if not isinstance(parsed, dict):
        raise UnsafeInput(f"{place}: its header is a JSON {type(parsed).__name__}, expected an object of tensors.")
    return parsed


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} stands there twice")
    return unique


def _metadata(entry: object, place: str) -> Mapping[str, str]:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise UnsafeInput(f"{place}: __metadata__ is not an object of strings.")
    return entry


def _tensor(name: str, entry: object, file: str, data_bytes: int, place: str) -> tuple[TensorInfo, int]:
    where = f"{place}: tensor {name[:80]!r}"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise UnsafeInput(f"{where} has a name that is not valid Unicode.") from None
    if not isinstance(entry, dict):
        raise UnsafeInput(f"{where} is described by a JSON {type(entry).__name__}, expected dtype, shape and data_offsets.")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise CannotLook(f"{where} has dtype {brief(dtype)}, expected one of {', '.join(ITEM_BITS)}.")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise UnsafeInput(f"{where} has shape {brief(shape)}, expected whole numbers from 0 to 2^48.")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise UnsafeInput(f"{where} has data_offsets {brief(offsets)}, expected [begin, end].")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise UnsafeInput(
            f"{where} stands at data bytes {begin} to {end}, but the file holds {data_bytes} after its header: the file is "
            "truncated or its header lies. Download or save it again."
        )
    num_bits = num_elements(tuple(shape)) * ITEM_BITS[dtype]
    if num_bits != (end - begin) * 8:
        raise UnsafeInput(
            f"{where} of shape {brief(shape)} and dtype {dtype} has {end - begin} bytes, expected "
            f"{brief(-(-num_bits // 8))}: its header lies."
        )
    return TensorInfo(name=name, shape=tuple(shape), dtype=dtype.lower(), file=file, num_bytes=end - begin), begin


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    """True for a list of whole numbers from 0 to 2^48 (JSON true is no number here)."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_DIMENSION for item in value)


def _check_coverage(tensors: Mapping[str, TensorInfo], starts: Mapping[str, int], *, first: int, size: int, place: str) -> None:
    """Tensors must cover the data exactly, as the format demands: no two share a byte, no byte is left over."""
    end, before = first, "the header"
    for name in sorted(tensors, key=lambda name: (starts[name], tensors[name].num_bytes)):
        if starts[name] != end:
            what = "overlaps" if starts[name] < end else "leaves a gap after"
            raise UnsafeInput(
                f"{place}: tensor {name[:80]!r} at byte {starts[name]} {what} {before[:80]!r}, which ends at "
                f"{end}. No safetensors "
                "library writes or loads such a file."
            )
        end, before = starts[name] + tensors[name].num_bytes, name
    if end != size:
        raise UnsafeInput(
            f"{place}: {size - end} bytes follow the last tensor; the format allows none. Download or save it again."
        )
