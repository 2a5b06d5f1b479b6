"""The label strip as SVG: tokens side by side like text, each with its label and weight below it."""

from __future__ import annotations

from collections.abc import Sequence

from ghoststep.pictures.label_strip import Column, weight_words
from ghoststep.pictures.svg import CHARACTER, box, number, path, picture, text
from ghoststep.pictures.words import columns

_WIDTH = 760
_LEFT = 66
_LINE = 18
_RULES = {
    ".plus": "fill:var(--good)", ".minus": "fill:var(--minus)", ".soft": "fill:var(--soft)", ".alarm": "fill:var(--bad);opacity:.3",
    ".edge": "fill:none;stroke:var(--bad);stroke-width:1.5;stroke-dasharray:4 2", ".bar": "fill:var(--faint)",
}  # fmt: skip


def draw(made: Sequence[Column], label_names: Sequence[str], *, title: str, closing: Sequence[str]) -> str:
    """The document. A line of the picture is: positions, tokens, one line a label, weights."""
    block = 14 + _LINE * (2 + len(label_names)) + 16
    parts = [text(12, 22, title, "head")]
    x, y = float(_LEFT), 40.0
    if made:
        parts += _margin(label_names, y)
    for column in made:
        wide = (
            CHARACTER * max([columns(column.token), *(columns(label) for label in column.labels), _weight_columns(column)]) + 10
        )
        if x > _LEFT and x + wide > _WIDTH - 12:
            x, y = float(_LEFT), y + block
            parts += _margin(label_names, y)
        parts += _column(column, x, y, wide, len(label_names))
        x += wide + 4
    y += block if made else 0
    parts += _legend(12, y + 6)
    parts += [text(12, y + 32 + _LINE * i, line, "quiet") for i, line in enumerate(closing)]
    height = y + 32 + _LINE * len(closing)
    return picture(parts, _WIDTH, height, title=title, description="; ".join(closing), rules=_RULES)


def _weight_columns(column: Column) -> int:
    return max(len(weight_words(column.weight)), 3 if column.is_padding else 1)


def _margin(label_names: Sequence[str], y: float) -> list[str]:
    names = ["token", *label_names, "weight"]
    return [text(_LEFT - 8, y + 28 + _LINE * i, name, "small quiet", "end") for i, name in enumerate(names)]


def _column(column: Column, x: float, y: float, wide: float, num_labels: int) -> list[str]:
    middle, carries = x + wide / 2, column.weight != 0
    token = "quiet" if column.is_padding else ""
    parts = [
        text(middle, y + 8, str(column.position), "small quiet", "middle"),
        box(x, y + 14, wide, _LINE + 2, "soft", ' rx="3"'),
    ]
    if carries:
        kind = "alarm" if column.is_padding else "plus" if column.weight > 0 else "minus"
        opacity = "" if column.is_padding else f' opacity="{number(0.1 + 0.5 * column.strength)}"'
        parts.append(box(x, y + 14, wide, _LINE + 2, kind, f' rx="3"{opacity}'))
    parts.append(text(middle, y + 28, column.token, token, "middle"))
    for i, label in enumerate(column.labels):
        parts.append(text(middle, y + 28 + _LINE * (i + 1), label, "" if label != "·" else "quiet", "middle"))
    last = y + 28 + _LINE * (num_labels + 1)
    words = weight_words(column.weight) or ("PAD" if column.is_padding else "")
    parts.append(
        text(middle, last, words, "small bad" if column.is_padding and carries else "small quiet", "middle") if words else ""
    )
    if column.starts_document:
        parts.append(path([f"M{number(x - 2)} {number(y + 10)}V{number(last + 4)}"], "edge"))
    return parts


def _legend(x: float, y: float) -> list[str]:
    entries = [
        ("plus", "carries loss (stronger: more weight)"),
        ("minus", "away from the label"),
        ("alarm", "padding with loss"),
        ("soft", "no loss"),
    ]
    parts = []
    for kind, words in entries:
        more = ' opacity="0.6"' if kind in ("plus", "minus") else ""
        parts += [box(x, y - 10, 13, 13, kind, f' rx="3"{more}'), text(x + 19, y, words, "small quiet")]
        x += 19 + CHARACTER * 0.86 * len(words) + 16
    return parts
