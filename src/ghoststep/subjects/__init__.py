"""What can be looked at. `open_subject` turns what the user wrote into a subject."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ghoststep.subjects.base import Subject


def open_subject(spec: str, *, offline: bool = False, fast: bool = False) -> Subject:
    """The subject that `spec` names: `path.py:function` or `module:function` (a setup, whose function is run),
    `hf:org/name[@rev]` on the Hub, otherwise a path of a run folder, or of a checkpoint folder or file. `fast` bounds what a setup
    may cost.

    Raises `SubjectError` when it cannot be opened at all; the message says what was found, what is supported, what to do.
    """
    from ghoststep.subjects.setup import is_setup_spec, open_setup  # lazy: importing the package stays cheap

    if is_setup_spec(spec):
        return open_setup(spec, fast=fast)
    from ghoststep.subjects.run import is_run_folder, open_run, run_around, runs_inside

    if is_run_folder(Path(spec).expanduser()):
        return open_run(spec)
    from ghoststep.errors import SubjectError

    if around := run_around(spec):
        raise SubjectError(around)
    from ghoststep.subjects.checkpoint import open_checkpoint

    try:
        return open_checkpoint(spec, offline=offline)
    except SubjectError as error:
        if inside := runs_inside(spec):
            raise SubjectError(f"{inside} As a checkpoint: {error}") from error
        raise
