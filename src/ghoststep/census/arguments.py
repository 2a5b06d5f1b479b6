"""From what the user wrote to a list of subjects: arguments, globs and list files, in order, each once."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ghoststep.census.organisation import models_of
from ghoststep.errors import UsageError

HUB_PREFIX = "hf:"
MAX_LIST_BYTES = 16 << 20
MAX_SUBJECTS = 100_000
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")
_COMMENT = re.compile(r"(?:^|\s)#.*$")
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjects:
    """`subjects` in order. `remarks` say what was left out and why: for stderr."""

    subjects: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def collect(arguments: Sequence[str], list_file: Path | None = None, *, offline: bool = False) -> Subjects:
    """Expand globs, read the list, drop repetitions. Relative paths count from the working directory, in a list too.

    A glob keeps folders and weight files; other files (README, config.json) are left out with a remark. A path that exists is
    never taken for a glob. A glob that matches nothing stays in the list, so that its line says so. `hf:org/*` asks the Hub.
    `UsageError` without any subject, for a list that cannot be read, an organisation that cannot be listed or has more than
    1,000 models, or above 100,000 subjects.
    """
    wanted = [*arguments, *(read_list(list_file) if list_file is not None else ())]
    found: list[str] = []
    remarks: list[str] = []
    for text in wanted:
        found += _expand(text, remarks, offline)
        if len(found) > MAX_SUBJECTS:
            raise UsageError(f"more than {MAX_SUBJECTS} subjects: divide the census into several lists")
    kept = {_identity(subject): subject for subject in reversed(found)}
    subjects = tuple(subject for subject in dict.fromkeys(found) if kept[_identity(subject)] == subject)
    if len(subjects) < len(found):
        remarks.append(f"{len(found) - len(subjects)} subjects were named more than once and are counted once")
    if not subjects:
        raise UsageError("nothing to count: give checkpoint folders, files, globs or hf:org/name, or --list FILE")
    return Subjects(subjects=subjects, remarks=tuple(remarks))


def read_list(path: Path) -> tuple[str, ...]:
    """One subject a line; "#" at the start of a line or after a space begins a comment. `UsageError` if it cannot be read."""
    try:
        if path.stat().st_size > MAX_LIST_BYTES:
            raise UsageError(f"--list {path}: larger than {MAX_LIST_BYTES} bytes; expected one subject a line")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"--list {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--list {path}: not UTF-8 text; expected one subject a line") from error
    lines = (_COMMENT.sub("", line).strip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def _expand(text: str, remarks: list[str], offline: bool) -> Iterable[str]:
    if text.startswith(HUB_PREFIX):
        if not _WILD.search(text):
            return (text,)
        return (f"{HUB_PREFIX}{name}" for name in models_of(text[len(HUB_PREFIX) :], offline=offline))
    path = os.path.expanduser(text)
    if not _WILD.search(path) or os.path.lexists(path):
        return (text,)
    matches = sorted(glob.glob(path, recursive=True))
    chosen = [match for match in matches if os.path.isdir(match) or match.lower().endswith(_WEIGHT_SUFFIXES)]
    if len(chosen) < len(matches):
        remarks.append(f"{text}: {len(matches) - len(chosen)} matching files are no weight files and are left out")
    return chosen or (text,)


def _identity(subject: str) -> str:
    return subject if subject.startswith(HUB_PREFIX) else os.path.realpath(os.path.expanduser(subject))
