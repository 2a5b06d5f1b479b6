"""The command line: one file a verb, each imported light; heavy work is imported inside the verbs.

Exit codes of every verb: 0 nothing at or above `--fail-on` and something was answered; 1 findings; 2 could not run, a check
broke, or no check could answer.
"""

from __future__ import annotations

import sys

import typer

from ghoststep.cli.check import check
from ghoststep.cli.checks import checks
from ghoststep.cli.explain import explain
from ghoststep.errors import GhoststepError

app = typer.Typer(
    name="ghoststep",
    help="Find silent failures of language-model training, prove them, and say what to do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(check)
app.command()(explain)
app.command()(checks)


def _version(value: bool) -> None:
    if value:
        import ghoststep

        typer.echo(f"ghoststep {ghoststep.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version and exit."),
) -> None:
    """Find silent failures of language-model training, prove them, and say what to do."""


def main() -> None:
    """Entry point: our deliberate errors become one line on stderr and exit code 2."""
    try:
        app()
    except GhoststepError as error:
        from ghoststep.text import visible

        lines = [visible(line) for line in str(error).splitlines()]
        sys.stderr.write("ghoststep: " + "\n".join(lines) + "\n")
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(2)
