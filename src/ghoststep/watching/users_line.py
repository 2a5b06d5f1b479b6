"""A warning that points at the user's line, not at one of ours or of a trainer's."""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("ghoststep.watch")

NOT_THE_USERS = frozenset(
    {
        "ghoststep", "torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "lightning", "pytorch_lightning",
        "lightning_fabric", "contextlib", "functools", "threading", "weakref",
    }
)  # fmt: skip
"""Top-level packages between a user's line and ours. `skip_file_prefixes` of `warnings.warn` exists from Python 3.12 on."""


class GhoststepWarning(UserWarning):
    """An alarm of a watch whose policy is "warn", or a watch that could not watch anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of code. seen: where `warnings` remembers what it told about its module."""

    file: str
    number: int
    module: str = ""
    seen: dict[Any, Any] = field(default_factory=dict, repr=False)

    def warn(self, text: str) -> None:
        """A `GhoststepWarning` at this line. Raises it where the user turned warnings into errors."""
        warnings.warn_explicit(text, GhoststepWarning, self.file, self.number, self.module or None, self.seen)

    def warn_or_log(self, text: str) -> None:
        """The same where nothing may be raised: a warning that is an error, or that nobody can show any more, becomes a log line."""
        try:
            self.warn(text)
        except Exception:
            logger.warning("%s", text)


def users_line() -> Line:
    """The innermost line of the stack that is the user's; the outermost one where all are libraries' (a thread of autograd)."""
    frame = sys._getframe(1)
    while _package(frame) in NOT_THE_USERS and frame.f_back is not None:
        frame = frame.f_back
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    return Line(
        file=frame.f_code.co_filename, number=frame.f_lineno or 0, module=str(frame.f_globals.get("__name__", "")),
        seen=seen if isinstance(seen, dict) else {},
    )  # fmt: skip


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
