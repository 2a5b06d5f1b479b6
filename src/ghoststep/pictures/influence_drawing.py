"""The influence matrix as SVG. K × L cells: targets downwards, sources to the right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ghoststep.pictures.cells import FORBIDDEN_ERROR, MIDDLE, STRONG, WEAK, Cells, shade
from ghoststep.pictures.svg import CHARACTER, box, number, path, picture, text
from ghoststep.pictures.words import columns, wrap

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SIDE = 480  # pixels of the matrix at most
_CELL = 20
_LINE = 17
_RULES = {
    ".s0": "fill:var(--empty)", ".s1": "fill:var(--s1)", ".s2": "fill:var(--s2)", ".s3": "fill:var(--s3)", ".s4": "fill:var(--s4)",
    ".x1": "fill:var(--bad);opacity:.5", ".x2": "fill:var(--bad)", ".no": "fill:none;stroke:var(--faint);stroke-width:1",
    ".tint": "fill:var(--tint)", ".edge": "fill:none;stroke:var(--bad);stroke-width:1.5;stroke-linecap:square",
    ".frame": "fill:none;stroke:var(--faint)", ".grid": "fill:none;stroke:var(--paper);stroke-width:1",
}  # fmt: skip


def draw(drawn: Cells, names: Sequence[str], *, title: str, verdict: str, floor: float, words: Sequence[str]) -> str:
    """The document. `names` label the targets when every cell is one position; otherwise positions are marked in steps."""
    num_rows, num_columns = drawn.allowed_KL.shape
    cell = min(_CELL, _SIDE / max(num_rows, num_columns, 1))
    left = 16 + CHARACTER * max([columns(n) for n in names] + [len(str(max(num_rows, num_columns) * drawn.size))])
    top, right = 58, left + cell * num_columns
    width = max(right + 16, 620)
    room = int((width - 24) / CHARACTER)
    heading, closing = wrap(title.split("  "), room), wrap([verdict], room)
    top += _LINE * (len(heading) - 1)
    parts = [text(12, 22 + _LINE * i, line, "head") for i, line in enumerate(heading)]
    parts += _numbers(drawn, names, cell, left, top)
    parts += _shapes(drawn, cell, left, top, floor)
    legend, y = _legend(12, top + cell * num_rows + 28, width, floor, words, has_gaps=_has_gaps(drawn))
    parts += legend
    bad = any(shade(float(v), floor) for v in drawn.forbidden_KL.ravel())
    parts += [text(12, y + 24 + _LINE * i, line, "head bad" if bad else "") for i, line in enumerate(closing)]
    height = y + 24 + _LINE * len(closing)
    return picture(parts, width, height, title=title, description=verdict, rules=_RULES)


def _numbers(drawn: Cells, names: Sequence[str], cell: float, left: float, top: float) -> list[str]:
    num_rows, num_columns = drawn.allowed_KL.shape
    digits = len(str(max(num_rows, num_columns) * drawn.size))
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 10**9) if s * cell >= CHARACTER * (digits + 1) or s >= num_columns)
    parts = [
        text(left + cell * (k + 0.5), top - 6, str(k * drawn.size), "small quiet", "middle")
        for k in range(0, num_columns, step)
    ]
    rows = step if not names else 1
    for k in range(0, num_rows, rows):
        label = names[k] if names else str(k * drawn.size)
        quiet = "small quiet" if drawn.padding_K[k] or not names else "small"
        x, anchor = (12.0, "") if names else (left - 8, "end")  # numbers of names are aligned already
        parts.append(text(x, top + cell * (k + 0.5) + 4, label.rstrip(), quiet, anchor))
    return parts


def _shapes(drawn: Cells, cell: float, left: float, top: float, floor: float) -> list[str]:
    """Cells of one shade are one path: a picture of 96 × 96 stays small."""
    num_rows, num_columns = drawn.allowed_KL.shape
    by_class: dict[str, list[str]] = {name: [] for name in ("s0", "s1", "s2", "s3", "s4", "no", "tint", "x1", "x2")}
    for k in range(num_rows):
        kinds = [_kind(drawn, k, i, floor) for i in range(num_columns)]
        start = 0
        for kind, run in groupby(kinds):
            length = len(list(run))
            x, y, w, h = left + cell * start, top + cell * k, cell * length, cell
            by_class[kind].append(
                f"M{number(x)} {number(y)}h{number(w)}v{number(h)}h{number(-w)}z" if kind != "no" else _hatch(x, y, w, h)
            )
            start += length
    parts = [path(pieces, kind) for kind, pieces in by_class.items()]
    if cell >= 10:
        parts.append(path(_grid(num_rows, num_columns, cell, left, top), "grid"))
    parts.append(box(left, top, cell * num_columns, cell * num_rows, "frame"))
    return [*parts, path(_outline(drawn.is_forbidden_KL, cell, left, top), "edge")]


def _kind(drawn: Cells, k: int, i: int, floor: float) -> str:
    bad = float(drawn.forbidden_KL[k, i])
    if shade(bad, floor):
        return "x2" if bad >= FORBIDDEN_ERROR else "x1"
    if drawn.is_forbidden_KL[k, i]:
        return "no" if math.isnan(bad) else "tint"
    level = shade(float(drawn.allowed_KL[k, i]), floor)
    return "no" if level is None else f"s{level}"


def _hatch(x: float, y: float, w: float, h: float) -> str:
    """One slanted stroke through each place that was not looked at."""
    steps = max(1, round(w / h))
    return "".join(f"M{number(x + h * i)} {number(y + h)}l{number(h)} {number(-h)}" for i in range(steps))


def _grid(num_rows: int, num_columns: int, cell: float, left: float, top: float) -> list[str]:
    lines = [f"M{number(left)} {number(top + cell * k)}h{number(cell * num_columns)}" for k in range(1, num_rows)]
    return lines + [f"M{number(left + cell * i)} {number(top)}v{number(cell * num_rows)}" for i in range(1, num_columns)]


def _outline(inside_KL: NDArray[np.bool_], cell: float, left: float, top: float) -> list[str]:
    """Strokes between cells inside and outside the forbidden region, in runs; the frame itself is not stroked."""
    strokes = []
    for turned, grid in ((False, inside_KL), (True, inside_KL.T)):
        for k in range(1, grid.shape[0]):
            differs = (grid[k] != grid[k - 1]).tolist()
            start = 0
            for edge, run in groupby(differs):
                length = len(list(run))
                if edge:
                    x, y = (left + cell * k, top + cell * start) if turned else (left + cell * start, top + cell * k)
                    strokes.append(f"M{number(x)} {number(y)}{'v' if turned else 'h'}{number(cell * length)}")
                start += length
    return strokes


def _legend(x: float, y: float, width: float, floor: float, words: Sequence[str], *, has_gaps: bool) -> tuple[list[str], float]:
    """Swatches with words, wrapped to the width; also the baseline of the last line."""
    entries = [(f"s{4 - i}", f"≥ {limit:g}") for i, limit in enumerate((STRONG, MIDDLE, WEAK))]
    entries += [("s1", f"> {floor:.0e}"), ("s0", "not seen")]
    entries += [("no", "not looked at")] if has_gaps else []
    if words:
        entries += [
            ("tint edge", f"must not be seen: {', '.join(words)}"),
            ("x2", f"seen all the same (pale: under {FORBIDDEN_ERROR:g})"),
        ]
    parts, at = [], x
    for kind, words_of_it in entries:
        needed = 20 + CHARACTER * columns(words_of_it) + 14
        if at > x and at + needed > width:
            at, y = x, y + 22
        if kind == "no":
            parts += [path([_hatch(at, y - 11, 13, 13)], "no"), box(at, y - 11, 13, 13, "frame")]
        else:
            parts += [box(at, y - 11, 13, 13, name) for name in kind.split(" ")]
        parts.append(text(at + 20, y, words_of_it, "quiet"))
        at += needed
    return parts, y


def _has_gaps(drawn: Cells) -> bool:
    import numpy as np

    shown = np.where(drawn.is_forbidden_KL, drawn.forbidden_KL, drawn.allowed_KL)
    return bool(np.isnan(shown).any())
