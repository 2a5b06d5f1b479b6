"""One check's page on stdout: shared by `explain` and its fast path in `main`."""

from __future__ import annotations

from ghoststep.catalogue import CheckPage
from ghoststep.report.destination import stdout_is_terminal, want_color, width, write
from ghoststep.report.explain import render_explain


def show(page: CheckPage) -> None:
    """Print it in the terminal's width and colours."""
    write(render_explain(page, color=want_color(stdout_is_terminal()), width=width()), None)
