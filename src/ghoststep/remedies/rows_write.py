"""Write a repaired copy of a checkpoint: all or nothing, byte for byte the same but for the rows."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ghoststep.durable import sync_folder
from ghoststep.errors import SubjectError, UsageError
from ghoststep.remedies.rows import RowRepair

MANIFEST = "ghoststep_fix.json"
_UNFINISHED = ".ghoststep-unfinished"
_BLOCK_BYTES = 1 << 22


def write_repair(source: Path, out: Path, repair: RowRepair, prove: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Copy `source` to the new folder `out` with the planned rows, and return the manifest written beside the weights.

    Everything is written to a hidden folder next to `out`, compared byte by byte with the original, handed to `prove` (which
    raises to refuse), flushed, and renamed at the end: a process killed at any moment leaves no folder called `out`, and the
    original is only ever read. An unfinished folder of an earlier, killed run is removed first. Raises `UsageError` if `out`
    exists, `SubjectError` where there is no room or a file changes while it is copied.
    """
    check_place(source, out)
    files = sorted(_files(source))
    _check_room(source, out, files)
    stage = out.parent / f".{out.name}{_UNFINISHED}"
    shutil.rmtree(stage, ignore_errors=True)
    try:
        stage.mkdir()
        hashes = {name: _copy(source / name, stage / name) for name in files}
        before = hashes[repair.file]
        after = _patch(source / repair.file, stage / repair.file, repair)
        manifest = _manifest(source, repair, before, after, len(files), prove(stage))
        _write_text(stage / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=True) + "\n")
        _flush_folders(stage)
        os.rename(stage, out)
        sync_folder(out.parent)
    except OSError as error:
        raise SubjectError(f"--out {out}: {error.strerror or error}. Nothing was written under that name.") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return manifest


def check_place(source: Path, out: Path) -> None:
    """`UsageError` unless `source` is a folder and `out` can become a new one beside or away from it."""
    if not source.is_dir():
        raise UsageError(
            f"{source} is not a folder on this machine; expected the folder of a checkpoint (download it first). Nothing was written."
        )
    if out.exists() or out.is_symlink():
        raise UsageError(f"--out {out} exists; name a folder that does not. Nothing was written.")
    if out.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"--out {out} lies inside the checkpoint; name a folder outside it. Nothing was written.")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.parent} does not exist. Nothing was written.")


def _files(source: Path) -> Iterator[str]:
    """Regular files below the folder (links to files are followed: a Hub cache consists of them), without hidden ones."""
    for root, folders, names in os.walk(source):
        folders[:] = [f for f in folders if not f.startswith(".")]
        for name in names:
            path = Path(root) / name
            if path.is_file() and not name.startswith(".") and name != MANIFEST:
                yield str(path.relative_to(source))


def _check_room(source: Path, out: Path, files: list[str]) -> None:
    needed = sum((source / name).stat().st_size for name in files)
    free = shutil.disk_usage(out.parent).free
    if needed + (64 << 20) > free:
        raise SubjectError(f"--out {out}: {needed:,} bytes are needed, {free:,} are free. Nothing was written.")


def _copy(old: Path, new: Path) -> str:
    """Copy a file and flush it; its SHA-256."""
    new.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with old.open("rb") as reader, new.open("xb") as writer:
        while block := reader.read(_BLOCK_BYTES):
            digest.update(block)
            writer.write(block)
        writer.flush()
        os.fsync(writer.fileno())
    shutil.copymode(old, new)
    os.chmod(new, new.stat().st_mode | 0o600)  # a read-only original would make a copy that cannot be patched or removed
    return digest.hexdigest()


def _patch(old: Path, new: Path, repair: RowRepair) -> str:
    """Overwrite the rows, then compare both files: every byte outside the rows must be equal. SHA-256 of the new file."""
    start = _tensor_start(old, repair)
    row_bytes = len(repair.rows[0].raw)
    changed = {start + r.table_row * row_bytes: r.raw for r in repair.rows}
    with new.open("r+b") as writer:
        for place, raw in changed.items():
            writer.seek(place)
            writer.write(raw)
        writer.flush()
        os.fsync(writer.fileno())
    _compare(old, new, changed)
    digest = hashlib.sha256()
    with new.open("rb") as reader:
        while block := reader.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _tensor_start(path: Path, repair: RowRepair) -> int:
    from ghoststep.subjects.containers.safetensors_file import read_header
    from ghoststep.subjects.local import LocalSource

    header = read_header(LocalSource(path.parent), path.name)
    info = header.tensors[repair.tensor]
    if info.shape != (repair.num_rows, repair.num_dims) or info.dtype != repair.dtype:
        raise SubjectError(
            f"{path.name}: {repair.tensor} is {info.dtype} {list(info.shape)} now, it was {repair.dtype} "
            f"[{repair.num_rows}, {repair.num_dims}] before: the checkpoint changed meanwhile"
        )
    return header.starts[repair.tensor]


def _compare(old: Path, new: Path, changed: Mapping[int, bytes]) -> None:
    """Raise unless `new` is `old` with exactly these bytes replaced."""
    places = sorted(changed)
    with old.open("rb") as one, new.open("rb") as other:
        position = 0
        while True:
            a, b = one.read(_BLOCK_BYTES), other.read(_BLOCK_BYTES)
            expected = bytearray(a)
            for place in places:
                raw = changed[place]
                low, high = max(place, position), min(place + len(raw), position + len(a))
                if low < high:
                    expected[low - position : high - position] = raw[low - place : high - place]
            if bytes(expected) != b:
                raise SubjectError(f"{new.name} differs from the original outside the repaired rows: the disk or another process "
                                   "interfered. Nothing was written under the new name.")  # fmt: skip
            if not a:
                return
            position += len(a)


def _manifest(
    source: Path, repair: RowRepair, before: str, after: str, num_files: int, proof: Mapping[str, Any]
) -> dict[str, Any]:
    import ghoststep

    return {
        "ghoststep": ghoststep.__version__,
        "repaired": source.name,
        "file": repair.file,
        "tensor": repair.tensor,
        "dtype": repair.dtype,
        "sha256_before": before,
        "sha256_after": after,
        "num_files_copied": num_files,
        "median_norm": repair.median_norm,
        "target_norm": repair.target_norm,
        "seed": repair.seed,
        "rows": [
            {"table_row": r.table_row, "token": r.token, "old_norm": r.old_norm, "new_norm": r.new_norm, "why": r.why}
            for r in repair.rows
        ],
        "left": [{"table_row": i, "why": why} for i, why in repair.left],
        "proof": dict(proof),
    }


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as writer:
        writer.write(text)
        writer.flush()
        os.fsync(writer.fileno())


def _flush_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        sync_folder(Path(folder))
