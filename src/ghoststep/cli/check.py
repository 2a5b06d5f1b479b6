"""`ghoststep check SUBJECT...`"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ghoststep.cli.options import split
from ghoststep.errors import SubjectError, UsageError
from ghoststep.report.destination import stdout_is_terminal, want_color, width, write

if TYPE_CHECKING:
    from ghoststep.subjects.base import Subject

_AllowUnknown = Annotated[list[str] | None, typer.Option(metavar="CODES", help="With --strict: these may be unknown.")]
_Step = Annotated[
    int | None, typer.Option(metavar="N", help="With a run and --setup: look at the batch that was kept of this step.")
]
_Setup = Annotated[
    str | None, typer.Option(metavar="FILE:FUNCTION", help="With --step: the setup whose model and loss get that batch.")
]
_Rank = Annotated[int | None, typer.Option(help="With --step: of this rank. \\[the lowest that kept it]")]


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
    allow_unknown: _AllowUnknown = None,
    baseline: Annotated[Path | None, typer.Option(help="A JSON report: count only findings that it has not.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A pyproject.toml with \\[tool.ghoststep]. \\[the nearest one upwards]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same subjects and seed: same report.")] = 0,
    offline: Annotated[bool, typer.Option("--offline", help="Never touch the network.")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="A setup may cost at most about three training steps.")] = False,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="What is not measured by then is unknown.")] = None,
    step: _Step = None,
    setup: _Setup = None,
    rank: _Rank = None,
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
        result = api.run(_opened(subjects, step, setup, rank, offline=offline, fast=fast), settings)
    color = output is None and want_color(stdout_is_terminal())
    write(report.render(result, format, color=color, width=width()), output)
    raise typer.Exit(result.exit_code)


def _opened(
    subjects: list[str], step: int | None, setup: str | None, rank: int | None, *, offline: bool, fast: bool
) -> list[Subject]:
    """The subjects as given; with --step and --setup, the setup with the batch that the run kept of that step."""
    from ghoststep import api

    if (step, setup, rank) == (None, None, None):
        return api.open_subjects(subjects, offline=offline, fast=fast)
    if step is None or setup is None:
        raise UsageError("--step N and --setup path.py:function go together: a kept batch needs a model to run on")
    if len(subjects) != 1 or not Path(subjects[0]).is_dir():
        raise UsageError(f"--step looks at one run: give its folder alone, not {' '.join(subjects)!r:.200}")
    from ghoststep.subjects.setup import is_setup_spec, open_setup
    from ghoststep.watching.replay import replay

    if not is_setup_spec(setup):
        raise UsageError(f"--setup {setup!r:.200}: expected path.py:function or module:function")
    return [replay(Path(subjects[0]), step, open_setup(setup, fast=fast), rank=rank)]


@contextlib.contextmanager
def _users_code() -> Iterator[None]:
    """What a setup's own code prints must not run into the report, and an exit of its must not pass for our answer."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise SubjectError(f"code of the setup called sys.exit({error.code!r:.60}) while it was checked") from error
