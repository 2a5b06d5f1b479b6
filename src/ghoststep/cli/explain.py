"""`ghoststep explain CODE` and `ghoststep explain --symptom "..."`"""

from __future__ import annotations

from typing import Annotated

import typer

from ghoststep.catalogue import CheckPage, find_page
from ghoststep.cli.page import show
from ghoststep.errors import UsageError
from ghoststep.report.destination import write


def explain(
    code: Annotated[str | None, typer.Argument(help="A code (GS301) or a name (near-zero-input-rows).")] = None,
    symptom: Annotated[
        str | None, typer.Option(metavar="TEXT", help='What you see, in your words: "grad_norm inf once in a while".')
    ] = None,
) -> None:
    """Explain a check: the flaw, how it is found, why it matters, when it is no problem, how to fix it."""
    if (code is None) == (symptom is None):
        raise UsageError('give a code or --symptom: `ghoststep explain GS301`, `ghoststep explain --symptom "never stops"`')
    if code is not None:
        show(_page(code))
        return
    from ghoststep.registry import load

    text, is_known = _suspects(symptom or "", {c.name: c.code for c in load(with_instruments=False).checks})
    write(text, None)
    if not is_known:
        raise typer.Exit(2)


def _page(code: str) -> CheckPage:
    from ghoststep.registry import load  # a plugin's check, or none: the registry knows, and suggests near names

    page = find_page(code)
    if page is not None:
        return page
    found = load(with_instruments=False).find(code)
    return CheckPage(code=found.code, name=found.name, severity=found.severity.value, basis=found.basis.value, doc=found.doc)


def _suspects(text: str, codes: dict[str, str]) -> tuple[str, bool]:
    """What to print, and whether a known symptom matches."""
    from ghoststep.symptoms import SYMPTOMS, match

    entries = match(text)
    lines = []
    if not entries:
        lines = ["No symptom in the list matches these words. Known symptoms:", ""]
        lines += [f"  - {entry.title}" for entry in SYMPTOMS]
        return "\n".join([*lines, "", "Without a symptom: `ghoststep check CHECKPOINT` asks every check."]), False
    for entry in entries:
        lines += [f"Symptom: {entry.title}", f"  {entry.meaning}", "  Suspects, likeliest first:"]
        for name in entry.suspects:
            known = codes.get(name)
            lines.append(f"    {known}  {name}  (ghoststep explain {known})" if known else f"    planned  {name}")
        lines += [f"  Prove it: {entry.command}", ""]
    return "\n".join(lines), True
