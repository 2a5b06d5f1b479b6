"""A report as text: seven formats, one module each, imported only when asked for.

Every format gets strings from strangers (tokens, file and tensor names) and escapes them for its own reader; see `escape`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from ghoststep.errors import UsageError

if TYPE_CHECKING:
    from ghoststep.finding import Report

_MODULES = {
    "terminal": "terminal",
    "concise": "concise",
    "json": "json_format",
    "sarif": "sarif",
    "junit": "junit",
    "github": "github",
    "markdown": "markdown",
}
FORMATS = tuple(_MODULES)
"""The names that `render` knows."""


class _Format(Protocol):
    def render(self, report: Report, *, color: bool, width: int) -> str: ...


def render(report: Report, format: str, *, color: bool = False, width: int = 100) -> str:  # noqa: A002 - the option's name
    """The report in one of `FORMATS`, ending with one newline; it can always be encoded as UTF-8.

    `color` and `width` (columns) matter to "terminal" only: whoever calls decides about NO_COLOR, FORCE_COLOR and COLUMNS.
    The last line of "terminal", "concise", "github" and "markdown" counts the verdicts, those that could not look included.
    `UsageError` for another format.
    """
    if format not in _MODULES:
        raise UsageError(f"no report format {format!r}; expected one of {', '.join(FORMATS)}.")
    module = cast("_Format", importlib.import_module(f"ghoststep.report.{_MODULES[format]}"))
    return module.render(report, color=color, width=width)
