"""`ghoststep gallery [NAME]`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ghoststep.errors import UsageError
from ghoststep.report.destination import stdout_is_terminal, want_color, width, write

if TYPE_CHECKING:
    from ghoststep.gallery_index import Exhibit, Shown


def gallery(
    name: Annotated[str | None, typer.Argument(help="A failure's name or code; without it all are listed.")] = None,
    picture: Annotated[
        bool, typer.Option(help="Draw who sees whom, or what the loss trains on, where it is about that.")
    ] = True,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write that picture as SVG, too.")] = None,
) -> None:
    """Show a silent failure of training: the harm in numbers, how it is found, and the cure."""
    from ghoststep.gallery_index import exhibits, find_exhibit, show

    if name is None:
        write(_listing(exhibits()), None)
        return
    exhibit = find_exhibit(name)
    color, columns = want_color(stdout_is_terminal()), width()
    shown = show(exhibit)
    write(_card(shown, color=color, columns=columns), None)
    if picture or svg is not None:
        drawn = _picture(exhibit, color=color, columns=columns, svg=svg)
        if drawn:
            write("\n" + drawn, None)
    if not (shown.is_harmful and shown.is_found and shown.is_cured):
        raise typer.Exit(2)


def _listing(every: tuple[Exhibit, ...]) -> str:
    longest = max((len(e.name) for e in every), default=0)
    lines = [f"{e.code}  {e.name:<{longest}}  {e.title}" for e in every]
    return "\n".join([*lines, "", f"{len(every)} failures. Run one: ghoststep gallery NAME"])


def _card(shown: Shown, *, color: bool, columns: int) -> str:
    """Harm before and after, the finding and the cure, wrapped to the width."""
    import textwrap

    from ghoststep.pictures.words import paint
    from ghoststep.text import visible

    exhibit = shown.exhibit
    key = 10

    def pair(name: str, text: str) -> list[str]:
        wrapped = textwrap.wrap(visible(text), max(20, columns - key), break_on_hyphens=False) or [""]
        heads = [name, *[""] * (len(wrapped) - 1)]
        return [f"{paint(f'{head:<{key}}', '2', color=color)}{line}" for head, line in zip(heads, wrapped, strict=True)]

    first = "nothing was found"
    if shown.first is not None:
        verdict, finding = shown.first
        first = f"{(finding.severity or verdict.severity).value} {verdict.code} {verdict.name}: {finding.message}"
    lines = [paint(f"{exhibit.code} {exhibit.name}", "1", color=color), *textwrap.wrap(exhibit.title, columns), ""]
    for heading, label in (("What people see", "seen"), ("What really happens", "really")):
        lines += pair(label, exhibit.sections.get(heading, ""))
    lines += pair("harm", f"{shown.harm_broken:.4g} broken, {shown.harm_cured:.4g} cured: {shown.harm_words}")
    lines += pair("found", first)
    lines += pair("cure", exhibit.sections.get("The cure", ""))
    after = "; ".join(shown.left) if shown.left else "no error, no warning"
    lines += pair("cured", after)
    lines += ["", f"{shown.seconds:.1f} s. Yourself: ghoststep check {exhibit.path}:broken"]
    return "\n".join(lines)


def _picture(exhibit: Exhibit, *, color: bool, columns: int, svg: Path | None) -> str:
    """The broken setup's influence matrix (GS1) or label strip (GS2), written as SVG too if asked for; "" for other families."""
    if exhibit.code[:3] not in ("GS1", "GS2"):
        if svg is not None:
            raise UsageError(f"--svg: there is no picture of {exhibit.name}, only of failures of masks (GS1) and labels (GS2)")
        return ""
    from ghoststep.gallery_index import load_exhibit
    from ghoststep.pictures import pictures_of

    made = pictures_of(load_exhibit(exhibit).broken())
    is_mask = exhibit.code.startswith("GS1")
    if svg is not None:
        write(made.influence_svg() if is_mask else made.label_svg(), svg)
    if is_mask:
        return made.influence_text(width=columns, color=color)
    return made.label_text(width=columns, color=color, max_positions=48)
