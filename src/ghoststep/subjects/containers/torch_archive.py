"""Where the storages of a PyTorch file stand in it: the zip archive of `torch.save`, and the older stream of pickles."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ghoststep.errors import CannotLook, UnsafeInput
from ghoststep.subjects.base import Source
from ghoststep.subjects.containers.pickle_reader import Call, Name, Persistent, read_pickle
from ghoststep.subjects.containers.torch_pickle import DTYPES, STORAGES, is_known

MAX_PICKLE_BYTES = 64 << 20
"""The pickle of a state dict takes about 150 bytes a tensor; its data stand outside."""

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""The pickled magic number that opens a file of `torch.save(..., _use_new_zipfile_serialization=False)`."""

_LOCAL_HEADER_BYTES = 30
_LEGACY_WINDOW_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """The pickled value, the bytes of each storage by key, and a function from key to the first byte in the file.

    Asking for a first byte may read 30 bytes (over HTTP a request each, so it is done for the tables that are looked at only).
    """

    value: object
    storage_bytes: Mapping[str, int]
    start_of: Callable[[str], int]


class _Slice(io.RawIOBase):
    """Bytes [start, stop) of a file of a source as a seekable stream (what `zipfile` wants)."""

    def __init__(self, source: Source, file: str, start: int, stop: int) -> None:
        self._source, self._file, self._start, self._size = source, file, start, stop - start
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if origin + offset < 0:
            raise OSError("seek before the start")
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self._size - self._position, 0)
        count = left if size is None or size < 0 else min(size, left)
        first = self._start + self._position
        self._position += count
        return bytes(self._source.read(self._file, first, first + count))


def read_archive(source: Source, file: str, *, start: int = 0, stop: int | None = None) -> Archive:
    """Read a PyTorch file, or the part [start, stop) of a file that is one, without executing its pickle.

    Raises `UnsafeInput` for code in the pickle and lying sizes, `CannotLook` for other files. Cost: the pickle and, for zip
    archives, the list of members; the data are not read.
    """
    stop = source.size(file) if stop is None else stop
    head = bytes(source.read(file, start, min(stop, start + len(LEGACY_MAGIC))))
    if head.startswith(ZIP_MAGIC):
        return _read_zip(source, file, start, stop)
    if head == LEGACY_MAGIC and start == 0:
        return _read_legacy(source, file, stop)
    raise CannotLook(
        f"{source.name}: {file} starts with {head[:8].hex() or 'nothing'}: expected a zip archive or the magic "
        "number of torch.save. "
        "If it is a Git LFS pointer run `git lfs pull`; otherwise save the checkpoint again as safetensors."
    )


def _read_zip(source: Source, file: str, start: int, stop: int) -> Archive:
    place = f"{source.name}: {file}"
    try:
        with zipfile.ZipFile(_Slice(source, file, start, stop)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, UnicodeDecodeError) as error:
        raise CannotLook(
            f"{place} is a damaged or truncated zip archive ({str(error)[:120]}). Download or save it again."
        ) from None
    pickles = [member for member in members if member.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CannotLook(
            f"{place} is a zip archive with {len(pickles)} data.pkl, expected one: it was not written by torch.save."
        )
    root = pickles[0].filename.removesuffix("data.pkl")
    inside = {member.filename.removeprefix(root): member for member in members if member.filename.startswith(root)}
    for member in inside.values():
        _check_member(member, start, stop, place)
    if "byteorder" in inside:
        first = _locate(source, file, inside["byteorder"], start, stop)
        if bytes(source.read(file, first, first + min(inside["byteorder"].file_size, 8))).strip() != b"little":
            raise CannotLook(f"{place} was saved on a big-endian machine: load it with torch and save it as safetensors.")
    num_bytes = inside["data.pkl"].file_size
    _check_pickle_size(num_bytes, place)
    first = _locate(source, file, inside["data.pkl"], start, stop)
    value, _ = read_pickle(bytes(source.read(file, first, first + num_bytes)), allowed=is_known, place=place)
    storages = {name.removeprefix("data/"): member for name, member in inside.items() if name.startswith("data/")}
    return Archive(
        value=value,
        storage_bytes={key: member.file_size for key, member in storages.items()},
        start_of=lambda key: _locate(source, file, storages[key], start, stop),
    )


def _check_member(member: zipfile.ZipInfo, start: int, stop: int, place: str) -> None:
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        raise UnsafeInput(f"{place}: its member {member.filename[:80]!r} is compressed; torch.save never compresses.")
    header_start = start + member.header_offset
    if not start <= header_start <= stop - _LOCAL_HEADER_BYTES - member.file_size:
        raise UnsafeInput(f"{place}: its member {member.filename[:80]!r} lies outside the file. Download or save it again.")


def _locate(source: Source, file: str, member: zipfile.ZipInfo, start: int, stop: int) -> int:
    """First byte of a member's data. The length of its own header is not in the list of members, so that header is read."""
    header_start = start + member.header_offset
    header = bytes(source.read(file, header_start, header_start + _LOCAL_HEADER_BYTES))
    name_bytes, extra_bytes = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    first = header_start + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    if not header.startswith(ZIP_MAGIC) or first + member.file_size > stop:
        raise UnsafeInput(
            f"{source.name}: {file}: its member {member.filename[:80]!r} reaches outside the file. Download or save it again."
        )
    return first


def _check_pickle_size(num_bytes: int, place: str) -> None:
    if num_bytes > MAX_PICKLE_BYTES:
        raise UnsafeInput(f"{place}: its pickle has {num_bytes} bytes, more than {MAX_PICKLE_BYTES}; no state dict needs that.")


def _read_legacy(source: Source, file: str, stop: int) -> Archive:
    """Five pickles (magic, protocol, machine, value, storage keys), then for each key an int64 count and the data."""
    place = f"{source.name}: {file}"
    (_, _, machine, value, keys), position = _five_pickles(source, file, stop, place)
    if isinstance(machine, dict) and machine.get("little_endian") is False:
        raise CannotLook(f"{place} was saved on a big-endian machine: load it with torch and save it as safetensors.")
    item_bytes = _storage_item_bytes(value)
    starts, sizes = {}, {}
    for key in keys if isinstance(keys, list) else ():
        if not isinstance(key, str) or key not in item_bytes or position + 8 > stop:
            raise CannotLook(f"{place} is truncated, or lists a storage that no tensor uses. Download or save it again.")
        count = int.from_bytes(source.read(file, position, position + 8), "little")
        first, position = position + 8, position + 8 + count * item_bytes[key]
        if position > stop:
            raise CannotLook(
                f"{place}: a storage of {count} elements reaches past the end of the file: it is truncated or lies."
            )
        starts[key], sizes[key] = first, position - first
    return Archive(value=value, storage_bytes=sizes, start_of=starts.__getitem__)


def _five_pickles(source: Source, file: str, stop: int, place: str) -> tuple[list[object], int]:
    """The five values and where they end. The window grows until they fit, since nothing says how long they are."""
    window = _LEGACY_WINDOW_BYTES
    while True:
        data = bytes(source.read(file, 0, min(window, stop)))
        values: list[object] = []
        position = 0
        try:
            while len(values) < 5:
                value, used = read_pickle(data[position:], allowed=is_known, place=place)
                values.append(value)
                position += used
        except UnsafeInput:
            raise
        except CannotLook:
            if window >= stop:
                raise
            window *= 4
            _check_pickle_size(window, place)
            continue
        return values, position


def _storage_item_bytes(value: object) -> Mapping[str, int]:
    """Bytes of an element of each storage that the value refers to."""
    found: dict[str, int] = {}
    for persistent in _persistents(value):
        key = persistent.key
        if isinstance(key, tuple) and len(key) >= 5 and key[0] == "storage" and isinstance(key[1], Name):
            dtype = STORAGES.get(key[1].attribute)
            found[str(key[2])] = DTYPES[dtype][1] // 8 if dtype else 1
    return found


def _persistents(value: object) -> Collection[Persistent]:
    """Every reference to a storage inside a value; each object is visited once, without recursion."""
    found, pending, seen = [], [value], set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Persistent):
            found.append(item)
        elif isinstance(item, Call):
            pending += [item.args, item.items]
        elif isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, (list, tuple)):
            pending += item
    return found
