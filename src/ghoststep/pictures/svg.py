"""Parts of an SVG picture: the frame with its colours for light and dark, text, and shapes. Everything is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ghoststep.report.escape import for_html

CHARACTER = 7.3  # width in pixels of one column of the 12 px monospace font, on the safe side
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

_LIGHT = {
    "paper": "#ffffff", "ink": "#1f2328", "quiet": "#6e7781", "faint": "#d8dee4", "empty": "#f3f5f7",
    "s1": "#cfe3f8", "s2": "#8dbdee", "s3": "#3f86d3", "s4": "#0b4a93", "bad": "#d1242f", "tint": "#d1242f14",
    "good": "#1a7f37", "minus": "#8250df", "soft": "#f3f5f7",
}  # fmt: skip
_DARK = {
    "paper": "#0d1117", "ink": "#e6edf3", "quiet": "#8d96a0", "faint": "#30363d", "empty": "#161b22",
    "s1": "#12304f", "s2": "#1c5590", "s3": "#3f8fe0", "s4": "#a5d0ff", "bad": "#ff6a69", "tint": "#f8514922",
    "good": "#3fb950", "minus": "#b88cff", "soft": "#161b22",
}  # fmt: skip


def number(value: float) -> str:
    """At most one decimal, without a trailing zero: every byte counts in a picture of thousands of cells."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, content: str, classes: str = "", anchor: str = "") -> str:
    """A line of text; `content` may be anything."""
    more = (f' class="{classes}"' if classes else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{number(x)}" y="{number(y)}"{more}>{for_html(content)}</text>'


def box(x: float, y: float, width: float, height: float, classes: str, more: str = "") -> str:
    """A rectangle."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f'<rect class="{classes}" {place}{more}/>'


def path(pieces: Iterable[str], classes: str) -> str:
    """One path of many pieces; "" if there is none."""
    joined = "".join(pieces)
    return f'<path class="{classes}" d="{joined}"/>' if joined else ""


def picture(
    parts: Iterable[str], width: float, height: float, *, title: str, description: str, rules: Mapping[str, str]
) -> str:
    """The whole document. `rules` are further CSS rules, by selector; colours are var(--name) of the palettes above."""
    light, dark = (";".join(f"--{k}:{v}" for k, v in palette.items()) for palette in (_LIGHT, _DARK))
    style = (
        f"svg{{{light};color-scheme:light dark}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
        f"text{{font:12px {FONT};fill:var(--ink);white-space:pre}}"
        ".quiet{fill:var(--quiet)}.head{font-weight:600}.bad{fill:var(--bad)}"
        ".small{font-size:10px}.paper{fill:var(--paper)}" + "".join(f"{k}{{{v}}}" for k, v in rules.items())
    )
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    body = "\n".join(p for p in parts if p)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t d">\n'
        f'<title id="t">{for_html(title)}</title><desc id="d">{for_html(description)}</desc>\n<style>{style}</style>\n'
        f"{box(0, 0, width, height, 'paper')}\n{body}\n</svg>\n"
    )
