"""The command line: one file a verb; only the verb that is asked for is imported, and heavy work is imported inside it.

Exit codes of every verb: 0 nothing at or above `--fail-on` and something was answered; 1 findings; 2 could not run, a check
broke, or no check could answer.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from ghoststep.errors import GhoststepError

if TYPE_CHECKING:
    import typer

VERBS = ("check", "run", "explain", "checks", "census", "fix", "gallery")
_HELP = "Find silent failures of language-model training, prove them, and say what to do."


def build_app(verbs: tuple[str, ...] = VERBS) -> typer.Typer:
    """The application with these verbs; each is the function of its name in `ghoststep.cli.<verb>`."""
    import typer

    app = typer.Typer(
        name="ghoststep",
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def show_version(value: bool) -> None:
        if value:
            import ghoststep

            typer.echo(f"ghoststep {ghoststep.__version__}")
            raise typer.Exit

    @app.callback(help=_HELP)
    def root(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Print the version and exit."
        ),
    ) -> None:
        pass

    for verb in verbs:
        module = importlib.import_module(f"ghoststep.cli.{verb}")
        app.command(context_settings=getattr(module, "CONTEXT", None))(getattr(module, verb))
    return app


def _explained(arguments: list[str]) -> bool:
    """`explain CODE` of a built-in check, without typer: building typed parameters imports pydantic (typer 0.29, 45 ms), more
    than the page itself takes. Everything else about `explain` goes the ordinary way."""
    if len(arguments) != 2 or arguments[0] != "explain" or arguments[1].startswith("-"):
        return False
    from ghoststep.catalogue import find_page

    page = find_page(arguments[1])
    if page is not None:
        from ghoststep.cli.page import show

        show(page)
    return page is not None


def main() -> None:
    """Entry point: our deliberate errors become one line on stderr and exit code 2."""
    asked = sys.argv[1:2]
    try:
        if not _explained(sys.argv[1:]):
            build_app(tuple(asked) if asked and asked[0] in VERBS else VERBS)()
    except GhoststepError as error:
        from ghoststep.text import visible

        lines = [visible(line) for line in str(error).splitlines()]
        sys.stderr.write("ghoststep: " + "\n".join(lines) + "\n")
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(2)


if __name__ == "__main__":
    main()
