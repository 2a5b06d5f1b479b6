"""How parameters and shapes are named in messages."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c` or `a, b, c and 9 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def counted(number: int, noun: str) -> str:
    """`1 parameter`, `2 parameters`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def shape_text(shape: Sequence[int]) -> str:
    """`[60, 32]`."""
    return "[" + ", ".join(str(n) for n in shape) + "]"
