"""`ghoststep checks`"""

from __future__ import annotations

from typing import Annotated

import typer

from ghoststep.cli.options import split
from ghoststep.report.destination import write


def checks(
    select: Annotated[list[str] | None, typer.Option(metavar="CODES", help="Only these: codes, prefixes or names.")] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, with options and defaults.")] = False,
) -> None:
    """List every check: code, worst severity, basis, name, and the flaw in one sentence."""
    from ghoststep.registry import load

    registry = load(with_instruments=False)
    chosen = registry.select(split(select))
    if json:
        import msgspec

        rows = [
            {
                "code": c.code,
                "name": c.name,
                "severity": c.severity.value,
                "basis": c.basis.value,
                "flaw": c.flaw,
                "options": {o.name: o.default for o in c.options},
            }
            for c in chosen
        ]
        write(msgspec.json.format(msgspec.json.encode(rows)).decode(), None)
        return
    width = max(len(c.name) for c in chosen)
    lines = [f"{c.code}  {c.severity.value:<7}  {c.basis.value:<13}  {c.name:<{width}}  {c.flaw}" for c in chosen]
    lines += [f"plugin {p.name} failed to load: {p.reason}" for p in registry.broken_plugins]
    write("\n".join(lines), None)
    if registry.broken_plugins:
        raise typer.Exit(2)
