"""What several verbs share: where output goes, and in which colours."""

from __future__ import annotations

from ghoststep.report.destination import stdout_is_terminal, want_color, width, write

__all__ = ["split", "stdout_is_terminal", "want_color", "width", "write"]


def split(values: list[str] | None) -> tuple[str, ...]:
    """`--select GS3,GS001 --select untrained-rows` → ("GS3", "GS001", "untrained-rows")."""
    return tuple(part.strip() for value in values or () for part in value.split(",") if part.strip())
