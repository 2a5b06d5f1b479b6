"""What several verbs do with their options."""

from __future__ import annotations


def split(values: list[str] | None) -> tuple[str, ...]:
    """`--select GS3,GS001 --select untrained-rows` → ("GS3", "GS001", "untrained-rows")."""
    return tuple(part.strip() for value in values or () for part in value.split(",") if part.strip())
