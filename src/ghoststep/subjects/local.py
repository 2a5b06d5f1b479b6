"""A folder or a single file on this machine as a `Source`.

Small pieces (headers) are read with `pread` into their own bytes. Larger ones are read-only views of one memory map a file:
a pass over a 1 GB table then copies nothing (measured: views 11-14 GB/s, `pread` into a buffer 5-9 GB/s), and mapped pages are
page cache, not memory of this process. The price: touching a view after somebody *shrank* the file kills the process
(SIGBUS). Every read therefore compares the file with what it was when first read and raises `CannotLook` if it changed;
only a truncation inside the milliseconds between this comparison and the use of the view remains.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ghoststep.errors import CannotLook, SubjectError, UnsafeInput

_PREAD_BELOW_BYTES = 1 << 16
_MAX_FILES = 20_000
_MAX_DEPTH = 2
_TEXT_SUFFIXES = (".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".merges", ".yaml", ".yml", ".spm")


def check_relative_name(name: str, *, where: str) -> str:
    """`name` itself if it is a plain relative name; `UnsafeInput` if it is absolute, climbs out, or is no portable name."""
    parts = name.split("/")
    unsafe = not name or "\\" in name or "\0" in name or ":" in parts[0] or any(part in ("", ".", "..") for part in parts)
    if unsafe:
        raise UnsafeInput(
            f"{where} names the file {name!r}: expected a name inside the same folder (no '..', no absolute path, no "
            "backslash). Nothing outside the folder was read. Get the checkpoint from its author again."
        )
    return name


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What a file was when first read; the same file must still be there for later reads."""

    device: int
    inode: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Stamp:
        return cls(status.st_dev, status.st_ino, status.st_size)


class LocalSource:
    """Files under `root`; with `only` set, that one file (and the text files beside it when `with_companions`).

    Folders are listed two levels deep without following symbolic links to folders; links to files are followed, since a Hub
    cache snapshot consists of them (the user chose this folder; names that come from *inside* a checkpoint go through
    `check_relative_name`). Threads may read at once. Maps are released with the source.
    """

    is_remote = False

    def __init__(self, root: Path, *, name: str | None = None, only: str | None = None, with_companions: bool = True) -> None:
        self.root = root
        self.name = name if name is not None else str(root if only is None else root / only)
        self._only = only
        self._with_companions = with_companions
        self._listing: tuple[str, ...] | None = None
        self._paths: dict[str, str] = {}
        self._stamps: dict[str, _Stamp] = {}
        self._maps: dict[str, mmap.mmap] = {}

    def files(self) -> tuple[str, ...]:
        """Names of all regular files, sorted; `SubjectError` for folders of more than 20,000 files."""
        if self._listing is None:
            self._listing = tuple(sorted(self._list()))
        return self._listing

    def _list(self) -> Iterator[str]:
        if self._only is None:
            yield from _walk(self.root, self.name)
            return
        yield self._only
        if self._with_companions and os.access(self.root, os.R_OK):
            for entry in _entries(self.root):
                if entry.name != self._only and entry.name.lower().endswith(_TEXT_SUFFIXES) and _is_file(entry):
                    yield entry.name

    def size(self, file: str) -> int:
        """Size in bytes; `CannotLook` if there is no such regular file."""
        return self._stamp(file, self._stat(file)).size

    def read(self, file: str, start: int, stop: int) -> memoryview | bytes:
        """Bytes [start, stop): own bytes below 64 KiB, else a read-only view of the map (see the module text)."""
        size = self.size(file)
        if not 0 <= start <= stop <= size:
            raise CannotLook(
                f"{self.name}: {file} has {size} bytes, expected bytes {start} to {stop}. The file is truncated "
                "or the file that "
                "refers to it is wrong: copy or download it again."
            )
        if stop - start < _PREAD_BELOW_BYTES:
            return self._pread(file, start, stop)
        return memoryview(self._map(file))[start:stop]

    def read_whole(self, file: str, *, limit_bytes: int) -> bytes:
        """The whole file as bytes; `CannotLook` when it is larger than `limit_bytes`."""
        size = self.size(file)
        if size > limit_bytes:
            raise CannotLook(f"{self.name}: {file} has {size} bytes, more than the {limit_bytes} that are read whole.")
        return self._pread(file, 0, size)

    def _path(self, file: str) -> str:
        path = self._paths.get(file)
        if path is None:  # checked once: a pass over a table reads thousands of blocks
            path = self._paths[file] = str(self.root / check_relative_name(file, where=self.name))
        return path

    def _stat(self, file: str) -> os.stat_result:
        try:
            status = os.stat(self._path(file))
        except (OSError, ValueError) as error:
            raise CannotLook(f"{self.name}: cannot read {file}: {_reason(error)}.") from error
        if not stat.S_ISREG(status.st_mode):
            raise CannotLook(f"{self.name}: {file} is not a regular file (a folder, pipe or device): it is not read.")
        return status

    def _stamp(self, file: str, status: os.stat_result) -> _Stamp:
        now = _Stamp.of(status)
        first = self._stamps.setdefault(file, now)
        if first != now:
            raise CannotLook(
                f"{self.name}: {file} changed while it was read ({first.size} bytes before, {now.size} now). Check again when "
                "nothing writes to the checkpoint."
            )
        return now

    def _pread(self, file: str, start: int, stop: int) -> bytes:
        try:
            handle = os.open(self._path(file), os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            raise CannotLook(f"{self.name}: cannot read {file}: {_reason(error)}.") from error
        with os.fdopen(handle, "rb", buffering=0) as raw:
            raw.seek(start)
            pieces, missing = [], stop - start
            while missing and (piece := raw.read(missing)):
                pieces.append(piece)
                missing -= len(piece)
        if missing:
            raise CannotLook(f"{self.name}: {file} ended {missing} bytes early while it was read.")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _map(self, file: str) -> mmap.mmap:
        mapped = self._maps.get(file)
        if mapped is None:
            try:
                with open(self._path(file), "rb") as raw:
                    mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CannotLook(f"{self.name}: cannot map {file}: {_reason(error)}.") from error
            mapped = self._maps.setdefault(file, mapped)  # another thread may have been first
        if len(mapped) != self._stamps[file].size:
            raise CannotLook(f"{self.name}: {file} changed while it was read. Check again when nothing writes to it.")
        return mapped


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _walk(root: Path, name: str) -> Iterator[str]:
    """Regular files below `root`, at most `_MAX_DEPTH` folders deep; hidden folders (.git) are left out."""
    num_files = 0
    pending = [("", 0)]
    while pending:
        prefix, depth = pending.pop()
        try:
            entries = _entries(root / prefix)
        except OSError as error:
            if depth == 0:
                raise SubjectError(f"{name}: cannot list this folder: {_reason(error)}.") from error
            continue
        for entry in entries:
            if _is_file(entry):
                num_files += 1
                if num_files > _MAX_FILES:
                    raise SubjectError(
                        f"{name}: more than {_MAX_FILES} files; expected the folder of one checkpoint (config.json and "
                        "weights). Name that folder instead."
                    )
                yield prefix + entry.name
            elif depth < _MAX_DEPTH and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                pending.append((f"{prefix}{entry.name}/", depth + 1))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Entries whose names are text; a name of undecodable bytes could not be shown in any report."""
    with os.scandir(folder) as found:
        return [
            entry for entry in found if entry.name.isascii() or not any("\ud800" <= char <= "\udfff" for char in entry.name)
        ]


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that points at itself
        return False
