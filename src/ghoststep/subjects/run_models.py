"""The record folders of one run: `RUN` for its first model, `RUN/model-2` and so on for further ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ghoststep.run_folder import rank_folders, read_tail
from ghoststep.subjects.base import Subject
from ghoststep.subjects.run import Run, is_run_folder, open_run


def numbered(run_dir: Path, number: int) -> Path:
    """The folder of the model with this number, from 1."""
    return run_dir if number == 1 else run_dir / f"model-{number}"


def number_of(folder: Path, run_dir: Path) -> int:
    """The other way round."""
    return 1 if folder == run_dir else int(folder.name.rpartition("-")[2])


def run_folders(run_dir: Path) -> list[Path]:
    """Those that hold a record, by number."""
    later = [p for p in run_dir.glob("model-*") if p.name[6:].isdecimal()] if run_dir.is_dir() else []
    return [f for f in (run_dir, *sorted(later, key=lambda p: int(p.name[6:]))) if is_run_folder(f)]


def with_further_models(subjects: Sequence[Subject]) -> list[Subject]:
    """The same, each run followed by the further models that lie inside its folder: a run whose second model loses every step would
    pass for clear by its first one. A record that was named itself is not taken twice."""
    given = {s.folder.resolve() for s in subjects if isinstance(s, Run)}
    found: list[Subject] = []
    for subject in subjects:
        found.append(subject)
        if isinstance(subject, Run):
            inside = [f for f in run_folders(subject.folder) if f != subject.folder and f.resolve() not in given]
            found += [open_run(os.path.join(subject.name, f.name)) for f in inside]
    return found


def last_numbers(run_dir: Path) -> dict[str, dict[int, int]]:
    """Folder → rank → number of its last step, of the records that are there: a later call tells what was written in between. A
    record that cannot be read has no rank. Cost: reads the last segment of each rank."""
    return {str(folder): _last_numbers(folder) for folder in run_folders(run_dir)}


def written_since(run_dir: Path, before: Mapping[str, Mapping[int, int]]) -> dict[Path, Mapping[int, int]]:
    """Folders with a record that is new or has more steps than `last_numbers` said → the numbers it had then."""
    return {
        f: before.get(str(f), {})
        for f in run_folders(run_dir)
        if str(f) not in before or _last_numbers(f) != dict(before[str(f)])
    }


def _last_numbers(folder: Path) -> dict[int, int]:
    try:
        return {rank: read_tail(where).last_number for rank, where in rank_folders(folder).items()}
    except Exception:  # unreadable or not a record after all: whoever reads it says so
        return {}
