"""A check's page for the terminal, from its docstring. Only `re` and `textwrap`: `explain` must start at once.

The docstring is Markdown with `## ` headings; understood are paragraphs, "- " items, fenced and indented blocks, and
`code` spans. The headings that every check of ours has are in `HEADINGS`, in their order.
"""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from ghoststep.text import visible

if TYPE_CHECKING:
    from ghoststep.catalogue import CheckPage

HEADINGS = (
    "What it finds",
    "Why it matters",
    "When it is not a problem",
    "How to confirm by hand",
    "How to fix",
    "Options",
    "References",
)

_RESET, _BOLD, _CYAN, _HEADING = "\x1b[0m", "\x1b[1m", "\x1b[36m", "\x1b[1;34m"
_SEVERITY = {"error": "\x1b[1;31m", "warning": "\x1b[33m", "note": "\x1b[34m"}
_SPAN = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_ITEM = re.compile(r"(?:[-*]|\d+\.) +|(?=`\w+`:)")  # a list item, or the line of an option
_MAX_WIDTH = 100  # columns: longer lines of prose are hard to read


def render_explain(check: CheckPage, *, color: bool = False, width: int = 100) -> str:
    """Code, name, severity, basis and the page, wrapped at `width` (40 to 100 columns), ending with one newline.

    Code blocks keep their lines, whatever the width. A docstring without headings is printed as it is.
    """
    width = min(max(width, 40), _MAX_WIDTH)
    severity, basis = check.severity, check.basis.replace("-", " ")
    head = f"{_paint(f'{visible(check.code)} {visible(check.name)}', _BOLD, color)} · {_paint(severity, _SEVERITY[severity], color)}"
    lines = [f"{head} · {basis}", ""]
    blocks = _blocks(check.doc)
    for i, block in enumerate(blocks):
        lines += _render(block, color, width)
        following = blocks[i + 1][0] if i + 1 < len(blocks) else ""
        close = block[0].startswith("#") or (_ITEM.match(block[0]) and _ITEM.match(following))
        lines += [] if close else [""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _blocks(doc: str) -> list[list[str]]:
    """Runs of lines that belong together: a heading, a paragraph, an item, a code block (with its fences)."""
    blocks: list[list[str]] = []
    current: list[str] = []
    fenced = False

    def close() -> None:
        if current:
            blocks.append(list(current))
            current.clear()

    for line in (visible(x) for x in doc.expandtabs().splitlines()):
        if line.lstrip().startswith("```"):
            if not fenced:
                close()
            current.append(line)
            if fenced:
                close()
            fenced = not fenced
        elif fenced:
            current.append(line)
        elif not line.strip():
            close()
        elif line.startswith("#"):
            close()
            blocks.append([line])
        else:
            if _ITEM.match(line):
                close()
            current.append(line)
    close()
    return blocks


def _render(block: list[str], color: bool, width: int) -> list[str]:
    first = block[0]
    if first.startswith("#"):
        return [_paint(first.lstrip("# "), _HEADING, color)]
    if first.lstrip().startswith("```"):
        code = block[1:-1] if block[-1].lstrip().startswith("```") and len(block) > 1 else block[1:]
        return [_paint("    " + line, _CYAN, color) for line in code]
    if all(line.startswith("    ") for line in block):
        return [_paint(line, _CYAN, color) for line in block]
    item = _ITEM.match(first)
    joined = " ".join(line.strip() for line in block)
    hang = " " * (2 + (len(item[0]) if item else 0))
    wrapped = textwrap.wrap(joined, width, initial_indent="  ", subsequent_indent=hang, break_on_hyphens=False)
    return _spans("\n".join(wrapped), color).split("\n")


def _spans(text: str, color: bool) -> str:
    """Code spans in colour. Without colour the backticks stay, since they say where a command starts and ends."""
    if not color:
        return text

    def paint(found: re.Match[str]) -> str:
        return "\n".join(re.sub(r"^( *)(.*)$", rf"\1{_CYAN}\2{_RESET}", part) for part in found[2].split("\n"))

    return _SPAN.sub(paint, text)


def _paint(text: str, style: str, color: bool) -> str:
    return f"{style}{text}{_RESET}" if color else text
