"""`ghoststep census MODEL...`"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ghoststep.errors import UsageError
from ghoststep.report.destination import width, write

if TYPE_CHECKING:
    from ghoststep.census.run import Census, Done

MAX_JOBS = 64


def census(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help='Checkpoint folders, files, globs (quoted too), hf:org/name, hf:org/name@revision, "hf:org/*".',
        ),
    ] = None,
    list_file: Annotated[
        Path | None, typer.Option("--list", metavar="FILE", help="More of them, one a line; # begins a comment.")
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="Checkpoints measured at once.")] = 2,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="For each checkpoint; without it there is no limit.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Keep finished ones here; run again to go on.")
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        str, typer.Option(help="terminal, csv (a line a checkpoint), csv-totals or json (both).")
    ] = "terminal",
    output: Annotated[Path | None, typer.Option(help="Write the result to a file instead of stdout.")] = None,
    fail_on: Annotated[
        str, typer.Option(help="never, or reachable: exit 1 if a near-zero or zero row is reachable.")
    ] = "never",
    offline: Annotated[bool, typer.Option("--offline", help="Never touch the network.")] = False,
) -> None:
    """Count near-zero and zero table rows in many checkpoints, raw and reachable. Reads only headers and tables."""
    from ghoststep.census import arguments, run, spool, terminal, writers
    from ghoststep.registry import load

    writer = {
        "terminal": terminal.to_terminal,
        "csv": writers.to_csv,
        "csv-totals": writers.totals_to_csv,
        "json": writers.to_json,
    }.get(format)
    if writer is None:
        raise UsageError(f"--format {format!r} is unknown; expected one of terminal, csv, csv-totals, json")
    if fail_on not in ("never", "reachable"):
        raise UsageError(f"--fail-on {fail_on!r} is unknown; expected never or reachable")
    if not 1 <= jobs <= MAX_JOBS:
        raise UsageError(f"--jobs {jobs}: expected 1 to {MAX_JOBS}")
    if timeout is not None and not timeout > 0:
        raise UsageError(f"--timeout {timeout:g}: expected more than 0 seconds")
    if output is not None and not os.access(output.parent, os.W_OK):  # said now, not after hours
        raise UsageError(f"--output {output}: its folder does not exist or cannot be written to")
    chosen = arguments.collect(models or (), list_file, offline=offline)
    for remark in chosen.remarks:
        _say(remark)
    settings = run.Settings(jobs=jobs, timeout_seconds=timeout, offline=offline)
    progress = _Progress(len(chosen.subjects))
    with spool.open_spool(state) as kept:
        if kept.num_torn:
            _say(f"--state {state}: {kept.num_torn} lines could not be read; those checkpoints are measured again")
        result = run.run(chosen.subjects, load().instruments, settings, kept, progress.step)
    progress.clear()
    if result.num_resumed:
        _say(f"{result.num_resumed} of {result.num_asked} checkpoints came from --state {state}")
    write(writer(result), output)
    _leave(result, fail_on)


def _leave(result: Census, fail_on: str) -> None:
    if result.is_interrupted:
        _say(f"interrupted after {len(result.records)} of {result.num_asked} checkpoints")
        if result.num_stragglers:  # waiting for them could take as long as a stalled server wishes
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130)
        raise typer.Exit(130)
    if not any(record.was_read for record in result.records):
        raise typer.Exit(2)
    raise typer.Exit(1 if fail_on == "reachable" and any(record.num_reachable for record in result.records) else 0)


def _say(text: str) -> None:
    from ghoststep.text import visible

    sys.stderr.write(f"ghoststep: {visible(text)}\n")


class _Progress:
    """One line on stderr that is written over, where stderr is a terminal; otherwise nothing."""

    def __init__(self, num_subjects: int) -> None:
        self._num_subjects = num_subjects
        self._num_done = 0
        self._is_shown = sys.stderr.isatty()

    def step(self, done: Done) -> None:
        """One more is finished."""
        self._num_done += 1
        if self._is_shown:
            text = f"{self._num_done}/{self._num_subjects} {done.record.status.value} {done.record.name}"
            sys.stderr.write(f"\r{text[: width() - 1]}\x1b[K")
            sys.stderr.flush()

    def clear(self) -> None:
        """Remove the line."""
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
