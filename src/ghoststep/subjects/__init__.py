"""What can be looked at. `open_subject` turns what the user wrote into a subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ghoststep.subjects.base import Subject


def open_subject(spec: str, *, offline: bool = False) -> Subject:
    """The subject that `spec` names: `hf:org/name[@rev]` on the Hub, otherwise a path of a checkpoint folder or file.

    Raises `SubjectError` when it cannot be opened at all; the message says what was found, what is supported, what to do.
    """
    from ghoststep.subjects.checkpoint import open_checkpoint  # lazy: importing the package stays cheap

    return open_checkpoint(spec, offline=offline)
