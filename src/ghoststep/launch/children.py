"""Starting the user's command so that every Python process in it, torchrun's workers too, meets `bootstrap`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ghoststep
from ghoststep.errors import UsageError
from ghoststep.launch import bootstrap
from ghoststep.launch.plan import Plan, rank_of

SITE = Path(__file__).parent / "site"

_FORWARDED = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


def environment(plan: Plan, reporter: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a watched command. reporter: id of the process that reports; the others only record."""
    before = base.get("PYTHONPATH", "")
    return {
        **base,
        "PYTHONPATH": f"{SITE}{os.pathsep}{before}" if before else str(SITE),
        bootstrap.PLAN: plan.encode(),
        bootstrap.REPORTER: str(reporter),
        "GHOSTSTEP_RUN_HOME": str(Path(ghoststep.__file__).resolve().parent.parent),
        "GHOSTSTEP_RUN_PYTHON": sys.executable,
    }


def become(command: Sequence[str], plan: Plan) -> None:
    """Replace this process by the command, which reports by itself at its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), environment(plan, os.getpid()))


def run(command: Sequence[str], plan: Plan) -> int:
    """Start the command, wait, report. Returns the exit code: the command's own; 1 if it was 0 and `plan.fail_on` was met."""
    from ghoststep.launch import telling

    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"{command[0]!r}: no such script, and no such command")
    with _recorded(plan) as recorded_plan:
        code = _waited([program, *command[1:]], environment(recorded_plan, os.getpid()))
        if rank_of() != 0:
            return code
        title = "" if plan.run_dir is not None else " ".join(command)[:80]
        reports = telling.recorded(recorded_plan, title=title)
        if reports:
            telling.tell(plan, reports)
        else:
            _say_nothing_seen(command)
        is_bad = bool(plan.fail_on) and telling.has_findings(reports, plan.fail_on)
        return 1 if code == 0 and is_bad else code


@contextlib.contextmanager
def _recorded(plan: Plan) -> Iterator[Plan]:
    """Where no record is wanted, one that is thrown away: it is how the processes that train tell this one."""
    if plan.run_dir is not None:
        yield plan
        return
    with tempfile.TemporaryDirectory(prefix="ghoststep-run-", ignore_cleanup_errors=True) as folder:
        yield replace(plan, run_dir=str(Path(folder) / "record"))


def _waited(command: Sequence[str], env: dict[str, str]) -> int:
    before: dict[int, Any] = {}
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: Any) -> None:
        if process is not None and not (number == signal.SIGINT and _terminal_told_everyone()):
            process.send_signal(number)

    for name in ("SIGINT", *_FORWARDED):
        number = getattr(signal, name, None)
        # What the caller ignores (nohup) stays ignored, here and in the command.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, forward)
    try:
        # No thread runs here that could hold a lock while this process is copied.
        process = subprocess.Popen(command, env=env, preexec_fn=_die_with_parent if sys.platform == "linux" else None)  # noqa: PLW1509
        code = process.wait()
    except OSError as error:
        raise UsageError(f"{command[0]!r} cannot be started: {error.strerror or error}") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _terminal_told_everyone() -> bool:
    """Ctrl-C in a terminal reaches every process in the foreground; twice would mean "at once" to many programs."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _die_with_parent() -> None:
    """In the child, before its program: SIGTERM when we are killed in a way that forwards nothing (Linux)."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))


def _say_nothing_seen(command: Sequence[str]) -> None:
    shut = [a for a in command[1:] if a.startswith("-") and not a.startswith("--") and set(a[1:]) & set("EIS")]
    is_python = Path(command[0]).name.startswith(("python", "pypy"))
    hint = f" (Python's option {shut[0]} keeps ghoststep out of the process)" if shut and is_python else ""
    sys.stderr.write(f"ghoststep run: nothing trained was seen{hint}\n")
