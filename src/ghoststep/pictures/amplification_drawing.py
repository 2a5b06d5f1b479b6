"""The amplification plot as SVG: norm to the right, gradient upwards, both in powers of ten."""

from __future__ import annotations

from collections.abc import Sequence

from ghoststep.pictures.amplification import OVERFLOW, Axes, Curve
from ghoststep.pictures.svg import CHARACTER, box, number, path, picture, text
from ghoststep.pictures.words import columns, wrap

_WIDTH, _HEIGHT, _LEFT, _LINE = 760, 360, 66, 18
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_RULES = {
    ".c0": "stroke:var(--s3)", ".c1": "stroke:var(--good)", ".c2": "stroke:var(--minus)", ".c3": "stroke:var(--ink)",
    ".curve": "fill:none;stroke-width:2", ".dot": "fill:var(--paper);stroke-width:2",
    ".frame": "fill:none;stroke:var(--faint)",
    ".grid": "fill:none;stroke:var(--faint);stroke-width:.5",
    ".line": "fill:none;stroke:var(--bad);stroke-width:1.2;stroke-dasharray:4 3",
}  # fmt: skip


def draw(drawn: Sequence[Curve], span: Axes, lost: float, *, title: str, closing: Sequence[str]) -> str:
    """The document."""
    room = int((_WIDTH - 24) / CHARACTER)
    heading = wrap(title.split("  "), room)
    top = 30.0 + _LINE * len(heading)
    wide = _WIDTH - _LEFT - 16
    parts = [text(12, 22 + _LINE * i, line, "head") for i, line in enumerate(heading)]

    def x(norm: float) -> float:
        return _LEFT + span.across(norm) * wide

    def y(gradient: float) -> float:
        return top + (1 - span.up(gradient)) * _HEIGHT

    parts += _grid(span, top, wide)
    for value, words in ((lost, f"lost: {lost:.3g}"), (OVERFLOW, "overflow: 1.84e19")):
        parts.append(path([f"M{_LEFT} {number(y(value))}h{wide}"], "line"))
        parts.append(text(_LEFT + wide - 4, y(value) - 4, words, "small bad", "end"))
    for curve in drawn:
        pieces = [f"{'L' if i else 'M'}{number(x(n))} {number(y(g))}" for i, (n, g) in enumerate(curve.points)]
        dash = f' stroke-dasharray="{_DASHES[curve.color]}"' if _DASHES[curve.color] else ""
        parts.append(path(pieces, f"curve c{curve.color}").replace("/>", f"{dash}/>"))
        parts += [
            f'<circle class="dot c{curve.color}" cx="{number(x(n))}" cy="{number(y(g))}" r="3"/>' for n, g in curve.points
        ]
    legend, base = _legend(drawn, top + _HEIGHT + 44)
    parts += legend
    told = [line for words in closing for line in wrap([words], room, "  ")]
    parts += [text(12, base + 26 + _LINE * i, line) for i, line in enumerate(told)]
    height = base + 30 + _LINE * len(told)
    return picture(parts, _WIDTH, height, title=title, description="; ".join(closing), rules=_RULES)


def _grid(span: Axes, top: float, wide: float) -> list[str]:
    across, upwards = _powers(span.left, span.right), _powers(span.bottom, span.top)
    lines, parts = [], []
    for power in across:
        at = _LEFT + (power - span.left) / (span.right - span.left) * wide
        lines.append(f"M{number(at)} {number(top)}v{_HEIGHT}")
        parts.append(text(at, top + _HEIGHT + 14, f"1e{power:d}", "small quiet", "middle"))
    for power in upwards:
        at = top + (1 - (power - span.bottom) / (span.top - span.bottom)) * _HEIGHT
        lines.append(f"M{_LEFT} {number(at)}h{number(wide)}")
        parts.append(text(_LEFT - 6, at + 4, f"1e{power:d}", "small quiet", "end"))
    parts.append(text(_LEFT + wide / 2, top + _HEIGHT + 28, "norm of the table row", "small quiet", "middle"))
    return [path(lines, "grid"), box(_LEFT, top, wide, _HEIGHT, "frame"), *parts]


def _powers(low: int, high: int) -> list[int]:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if (high - low) / s <= 8)
    return [p for p in range(low, high + 1) if p % step == 0]


def _legend(drawn: Sequence[Curve], y: float) -> tuple[list[str], float]:
    parts, at = [], 12.0
    for curve in drawn:
        needed = 44 + CHARACTER * columns(curve.name)
        if at > 12 and at + needed > _WIDTH:
            at, y = 12.0, y + 20
        dash = f' stroke-dasharray="{_DASHES[curve.color]}"' if _DASHES[curve.color] else ""
        parts.append(path([f"M{number(at)} {number(y - 4)}h24"], f"curve c{curve.color}").replace("/>", f"{dash}/>"))
        parts.append(text(at + 30, y, curve.name, "quiet"))
        at += needed
    return parts, y
