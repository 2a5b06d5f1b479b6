"""The record folders of one run: `RUN` for its first model, `RUN/model-2` and so on for further ones."""

from __future__ import annotations

import os
from pathlib import Path


def numbered(run_dir: Path, number: int) -> Path:
    """The folder of the model with this number, from 1."""
    return run_dir if number == 1 else run_dir / f"model-{number}"


def number_of(folder: Path, run_dir: Path) -> int:
    """The other way round."""
    return 1 if folder == run_dir else int(folder.name.rpartition("-")[2])


def run_folders(run_dir: Path) -> list[Path]:
    """Those that hold a record, by number."""
    from ghoststep.subjects.run import is_run_folder

    later = [p for p in run_dir.glob("model-*") if p.name[6:].isdecimal()] if run_dir.is_dir() else []
    return [f for f in (run_dir, *sorted(later, key=lambda p: int(p.name[6:]))) if is_run_folder(f)]


def sizes(run_dir: Path) -> dict[str, int]:
    """Folder → bytes of its record, of those that are there: a record only ever grows, so that a later call tells which were
    written to in between. A folder that cannot be read has 0."""
    return {str(folder): _bytes(folder) for folder in run_folders(run_dir)}


def written_since(run_dir: Path, before: dict[str, int]) -> list[Path]:
    """Folders with a record that is new, or has grown, since `sizes` said this."""
    return [f for f in run_folders(run_dir) if str(f) not in before or _bytes(f) != before[str(f)]]


def _bytes(folder: Path) -> int:
    from ghoststep.run_folder import rank_folders, segments

    try:
        return sum(os.stat(s).st_size for rank in rank_folders(folder).values() for s in segments(rank).values())
    except Exception:  # unreadable or not a record after all: whoever reads it says so
        return 0
