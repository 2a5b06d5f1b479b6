"""What stands after `--`: a script, `-m module`, `-c code`, or a command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ghoststep.errors import UsageError

_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz")


def python_command(target: Sequence[str]) -> list[str] | None:
    """The command of this interpreter for a script, `-m module` or `-c code`; None if the target is another program.

    The interpreter's own options (-O, -W, -X, -u) go on, but those that would keep us out (-E, -I, -S).
    """
    first = target[0]
    if first in ("-m", "-c"):
        if len(target) < 2:
            raise UsageError("-m needs the name of a module" if first == "-m" else "-c needs a program as text")
    elif first.startswith("-"):
        raise UsageError(
            f"{first!r} stands after `--`: options of ghoststep go before it; after it a script, -m MODULE, -c CODE or a command"
        )
    elif not _is_script(first):
        return None
    elif not Path(first).exists():
        raise UsageError(f"can't open {first!r}: no such file")
    return [sys.executable, *_interpreter_options(), *target]


def _is_script(first: str) -> bool:
    path = Path(first)
    if path.suffix in _SUFFIXES or (path / "__main__.py").is_file():
        return True
    # A file without suffix that cannot be started as a program: `python train` would run it.
    return path.is_file() and not os.access(path, os.X_OK)


def _interpreter_options() -> list[str]:
    given: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    is_unbuffered = getattr(sys.stdout, "write_through", False)
    return [o for o in given if o not in ("-E", "-I", "-S")] + (["-u"] if is_unbuffered else [])
