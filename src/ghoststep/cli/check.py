"""`ghoststep check SUBJECT...`"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ghoststep.cli.options import split, stdout_is_terminal, want_color, width, write
from ghoststep.errors import SubjectError, UsageError


def check(
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="SUBJECT...",
            help="A checkpoint folder or file, hf:org/name\\[@revision], or path.py:function (a setup: model, batch, loss, ...).",
        ),
    ],
    training: Annotated[
        str | None, typer.Option(help="full, lora, frozen-embeddings or rl: decides which findings are dangers. \\[full]")
    ] = None,
    select: Annotated[
        list[str] | None, typer.Option(metavar="CODES", help="Only these checks: codes, prefixes or names, comma-separated.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="CODES", help="Not these checks.")] = None,
    format: Annotated[  # noqa: A002 - the option's name
        str, typer.Option(help="terminal, concise, json, sarif, junit, github or markdown.")
    ] = "terminal",
    output: Annotated[Path | None, typer.Option(help="Write the report to a file instead of stdout.")] = None,
    fail_on: Annotated[str | None, typer.Option(help="Exit 1 from this severity on: error, warning or note. \\[error]")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 2 when a check could not look.")] = False,
    allow_unknown: Annotated[
        list[str] | None, typer.Option(metavar="CODES", help="With --strict: these may be unknown.")
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="A JSON report: count only findings that it has not.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A pyproject.toml with \\[tool.ghoststep]. \\[the nearest one upwards]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same subjects and seed: same report.")] = 0,
    offline: Annotated[bool, typer.Option("--offline", help="Never touch the network.")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="A setup may cost at most about three training steps.")] = False,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="What is not measured by then is unknown.")] = None,
) -> None:
    """Look at a checkpoint's files, or at a setup (model, batch, loss, optimizer), and say what will hurt training."""
    from ghoststep import api, report
    from ghoststep import config as configuration

    if format not in report.FORMATS:
        raise UsageError(f"--format {format!r} is unknown; expected one of {', '.join(report.FORMATS)}")
    config_path = config or configuration.find_config(Path.cwd())
    loaded = configuration.load_config(config_path) if config_path else configuration.Config()
    settings = api.CheckSettings(
        training=api.parse_training(training or loaded.training),
        select=split(select) or loaded.select,
        ignore=split(ignore) or loaded.ignore,
        fail_on=api.parse_severity(fail_on or loaded.fail_on),
        strict=strict or loaded.strict,
        allow_unknown=split(allow_unknown) or loaded.allow_unknown,
        baseline=baseline or api.configured_baseline(loaded, config_path),
        config=loaded,
        config_file=config_path.name if config_path else "pyproject.toml",
        seed=seed,
        offline=offline,
        timeout_seconds=timeout,
    )
    with _users_code():
        result = api.run(api.open_subjects(subjects, offline=offline, fast=fast), settings)
    color = output is None and want_color(stdout_is_terminal())
    write(report.render(result, format, color=color, width=width()), output)
    raise typer.Exit(result.exit_code)


@contextlib.contextmanager
def _users_code() -> Iterator[None]:
    """What a setup's own code prints must not run into the report, and an exit of its must not pass for our answer."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise SubjectError(f"code of the setup called sys.exit({error.code!r:.60}) while it was checked") from error
