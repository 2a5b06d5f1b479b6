"""Where a report goes, and in which colours: what every verb of the command line and the end of `ghoststep run` share."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

from ghoststep.errors import UsageError


def want_color(stream_is_tty: bool) -> bool:
    """NO_COLOR beats FORCE_COLOR beats "is it a terminal"."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream_is_tty and os.environ.get("TERM") != "dumb"


def width() -> int:
    """COLUMNS, or the terminal's width, or 100; never under 40."""
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def write(text: str, output: Path | None) -> None:
    """Result to stdout or to a file (UTF-8); what stdout's encoding lacks is written as a visible escape."""
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--output {output}: cannot be written: {error.strerror}") from error
        return
    if sys.stdout is None:
        raise UsageError("there is no standard output to write to; give --output FILE")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        if not text.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()  # now, while a full disk can still be told
    except BrokenPipeError:
        raise
    except OSError as error:
        _abandon_stdout()
        raise UsageError(f"the report could not be written to standard output: {error.strerror}") from error


def _abandon_stdout() -> None:
    """Python flushes again at exit and would fail again, with another exit code."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stdout_is_terminal() -> bool:
    """False also when there is no standard output at all."""
    return sys.stdout is not None and sys.stdout.isatty()
