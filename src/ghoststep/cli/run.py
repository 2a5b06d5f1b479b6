"""`ghoststep run [options] -- script.py args`"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ghoststep.errors import UsageError

if TYPE_CHECKING:
    from ghoststep.launch.plan import Plan

CONTEXT = {"allow_interspersed_args": False}
"""From the script's name on, every option is the script's, with or without `--`."""

_Command = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT.py|-m MODULE|-c CODE|COMMAND ARGS...",
        help="What you would give to `python`; or torchrun, accelerate, ...",
    ),
]
_Policy = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CODE=ACTION",
        help="What follows an alarm: log (default), warn, stop, raise, skip-step (with --strict). A code, a prefix (GS4=warn) or a "
        "name; or one word for all errors. Repeatable.",
    ),
]
_FailOn = Annotated[
    str | None,
    typer.Option(
        help="Exit 1 if the script ended with 0 and something this severe was found: error, warning or note. By default the exit code "
        "is the script's own in every case, since schedulers and retries act on it."
    ),
]
_Format = Annotated[str | None, typer.Option(help="terminal, concise, json, ...: the report goes to stdout in this form.")]


def run(
    command: _Command,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for the record, for `ghoststep check`. \\[ghoststep-runs/<time>]")
    ] = None,
    no_record: Annotated[bool, typer.Option("--no-record", help="Keep no record.")] = False,
    policy: _Policy = None,
    strict: Annotated[bool, typer.Option("--strict", help="Look before every step: one wait for the device a step.")] = False,
    sink: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help="jsonl:FILE, tensorboard:FOLDER, wandb, ... Repeatable.")
    ] = None,
    detail: Annotated[str, typer.Option(help="default, or full: every tensor's gradient norm is recorded.")] = "default",
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH_OR_NAME", help="To name tokens by their text; files of this machine only.")
    ] = None,
    fail_on: _FailOn = None,
    format: _Format = None,  # noqa: A002 - the option's name
    output: Annotated[Path | None, typer.Option(help="Write the report to a file. \\[terminal form on stderr]")] = None,
) -> None:
    """Run a training script, unchanged, with a watch beside it, and report at its end.

    Nothing that it computes or prints on stdout changes, and its exit code stays.
    """
    from ghoststep.launch import children, script

    target = command[1:] if command[0] == "--" else command
    if not target:
        raise UsageError("nothing to run: ghoststep run [options] -- script.py args")
    python = script.python_command(target)
    plan = _plan(run_dir, no_record, policy, strict, sink, detail, tokenizer, fail_on, format, output)
    if python is not None and not fail_on and os.name == "posix":
        children.become(python, plan)
    raise typer.Exit(children.run(python or target, plan))


def _plan(
    run_dir: Path | None, no_record: bool, policy: list[str] | None, strict: bool, sink: list[str] | None, detail: str,
    tokenizer: str | None, fail_on: str | None, format: str | None, output: Path | None,  # noqa: A002
) -> Plan:  # fmt: skip
    """The options, refused now where they cannot work: a script that trains for days must not tell at its first step."""
    from ghoststep.launch.plan import Plan, default_run_dir
    from ghoststep.report import FORMATS
    from ghoststep.subjects.run_models import last_numbers

    if no_record and run_dir is not None:
        raise UsageError("--no-record and --run-dir exclude each other")
    if detail not in ("default", "full"):
        raise UsageError(f"--detail {detail!r} is unknown; expected default or full")
    if format is not None and format not in FORMATS:
        raise UsageError(f"--format {format!r} is unknown; expected one of {', '.join(FORMATS)}")
    if fail_on is not None:
        from ghoststep.api import parse_severity

        parse_severity(fail_on)
    _refuse_sinks(sink or [])
    folder = None if no_record else (run_dir or default_run_dir(os.environ)).absolute()
    if folder is not None:
        _refuse_folder(folder)
    return Plan(
        run_dir=None if folder is None else str(folder), policy=_policy(policy or [], strict=strict), strict=strict,
        sinks=tuple(sink or ()), detail=detail, tokenizer=tokenizer, format=format or "",
        output="" if output is None else str(output.absolute()), fail_on=fail_on or "",
        before={} if folder is None else last_numbers(folder),
    )  # fmt: skip


def _policy(given: list[str], *, strict: bool) -> str | dict[str, str] | None:
    """One word, or code → action."""
    if not given:
        return None
    words = [g for g in given if "=" not in g]
    if words and len(given) > 1:
        raise UsageError(f"--policy {words[0]!r} speaks for all errors: give it alone, or CODE=ACTION each time")
    policy: str | dict[str, str] = words[0] if words else {g.partition("=")[0]: g.partition("=")[2] for g in given}
    from ghoststep.registry import load
    from ghoststep.watching.judge import run_checks
    from ghoststep.watching.policy import Means, parse

    means = Means(
        cannot_skip="" if strict else "it needs --strict",
        cannot_roll_back="it needs `for batch in w.guard(loader)` in the script: see ghoststep.watch",
    )
    parse(policy, run_checks(load(with_instruments=False).checks), means)
    return policy


def _refuse_sinks(specs: list[str]) -> None:
    from ghoststep.sinks import SPECS
    from ghoststep.sinks.spec import refuse

    kinds = {s.partition(":")[0].partition("[")[0] for s in SPECS}
    for spec in specs:
        if spec.partition(":")[0] not in kinds:
            raise UsageError(f"--sink {spec!r} is unknown; expected one of {', '.join(SPECS)}")
        try:
            refuse(spec)  # else the watch could not start when the model first runs, and days of training were not watched
        except UsageError as error:
            raise UsageError(f"--sink: {error}") from error


def _refuse_folder(folder: Path) -> None:
    from ghoststep.subjects.run import is_run_folder

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--run-dir {folder}: is a file")
    if folder.is_dir() and not is_run_folder(folder) and any(not e.name.startswith((".", "rank-")) for e in os.scandir(folder)):
        raise UsageError(f"--run-dir {folder}: holds other things; name a new or an empty folder, or one of an earlier run")
