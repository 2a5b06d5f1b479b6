"""Running the test scripts as a user does: real processes, with a limit on everything."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = 150.0
GHOSTSTEP = [sys.executable, "-m", "ghoststep.cli.main"]

Done = subprocess.CompletedProcess[str]


def environment(**more: str) -> dict[str, str]:
    """Ours, without what would change the output, one thread, and with this environment's programs first on the path."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("GHOSTSTEP_", "PYTEST_", "COV_", "FORCE_COLOR", "COLUMNS"))
    }
    first = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    root = str(Path(__file__).parents[2])  # the scripts share `tests.launch.scripts.toys`
    more["PYTHONPATH"] = os.pathsep.join(p for p in (more.get("PYTHONPATH", ""), root, kept.get("PYTHONPATH", "")) if p)
    return {**kept, "PATH": first, "OMP_NUM_THREADS": "1", "COLUMNS": "1000", "HF_HUB_OFFLINE": "1", **more}


def call(command: list[str], cwd: Path, env: Mapping[str, str] | None = None) -> Done:
    """Run to the end."""
    return subprocess.run(command, cwd=cwd, env=environment(**(env or {})), capture_output=True, text=True, timeout=LIMIT)  # noqa: PLW1510


def start(command: list[str], cwd: Path) -> subprocess.Popen[str]:
    """Start, with pipes."""
    return subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


@functools.cache
def bare(script: str, *args: str) -> Done:
    """The script as it is; run once for all tests that compare with it."""
    with tempfile.TemporaryDirectory() as folder:
        return call([sys.executable, str(SCRIPTS / script), *args], Path(folder))


def watched(script: str, *args: str, cwd: Path, options: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> Done:
    """The script under `ghoststep run`; its record is `cwd / "run"` unless the options say otherwise."""
    where = () if {"--run-dir", "--no-record"} & set(options) else ("--run-dir", "run")
    return call([*GHOSTSTEP, "run", *where, *options, "--", str(SCRIPTS / script), *args], cwd, env)


LOST = ("GS401 zeroed-step", "table row 17", "position 8 of example 1", "in step 12", "rank 0")


def assert_found(done: Done, *words: str) -> None:
    """The report on stderr says all of it."""
    missing = [w for w in words or LOST if w not in done.stderr]
    assert not missing, (missing, done.stderr[-4000:])
