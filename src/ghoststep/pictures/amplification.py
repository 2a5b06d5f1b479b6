"""The gradient of an input row against its norm, drawn: both axes in powers of ten, a line a place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.evidence.amplification import FIRST, LEFT, MIDDLE, OVERFLOW_GRADIENT, PACKED, Reading
from ghoststep.pictures.words import pad, paint, wrap

if TYPE_CHECKING:
    from ghoststep.evidence.amplification import Amplification, Place

_MARKS = "fmpl0123456789abcdeghijknoqrstuvwxyz"
_NAMES = (FIRST, MIDDLE, PACKED, LEFT)
_SHORT = {FIRST: "first", PACKED: "packed start", LEFT: "left padded"}
_COLORS = ("38;5;33", "38;5;40", "38;5;141", "38;5;214")
_BAD, _QUIET = "31", "2"
_ROWS = 18
OVERFLOW = OVERFLOW_GRADIENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One place and one direction. points: (norm, gradient), norm falling, both finite and above 0. mark: its letter."""

    name: str
    mark: str
    color: int
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Powers of ten that the picture spans, whole numbers."""

    left: int
    right: int
    bottom: int
    top: int

    def across(self, norm: float) -> float:
        """0 at the left edge, 1 at the right one."""
        return (math.log10(norm) - self.left) / (self.right - self.left)

    def up(self, gradient: float) -> float:
        """0 at the bottom, 1 at the top."""
        return (math.log10(gradient) - self.bottom) / (self.top - self.bottom)


def amplification_text(found: Amplification, *, width: int = 80, color: bool = False) -> str:
    """For a terminal, ending with a line feed: the plot, every reading, and the norms at which a step is lost.

    width: columns, at least 40. color: ANSI colours.
    """
    width = max(40, width)
    drawn = curves(found)
    lines = wrap(title(found), width)
    if drawn:
        lines += _plot(drawn, axes(found, drawn), found.lost, width, color=color)
        lines += wrap([paint(f"{c.mark} {c.name}", _COLORS[c.color], color=color) for c in drawn], 10**6 if color else width)
    lines += ["", *_table(found, width), ""]
    for line in closing(found):
        lines += wrap([line], width, "  ")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def amplification_svg(found: Amplification) -> str:
    """The same plot as a self-contained SVG that follows light and dark."""
    from ghoststep.pictures.amplification_drawing import draw  # lazy: the terminal does not need it

    drawn = curves(found)
    return draw(drawn, axes(found, drawn), found.lost, title="  ".join(title(found)), closing=closing(found))


def curves(found: Amplification) -> list[Curve]:
    """Every place and direction with at least one point that can be drawn."""
    several = len({r.direction for p in found.places for r in p.readings}) > 1
    made: list[Curve] = []
    for place in found.places:
        for direction in sorted({r.direction for r in place.readings}):
            points = _points(place, direction)
            if points:
                at = _NAMES.index(place.name)
                mark = _MARKS[at]
                taken = {c.mark for c in made}
                mark = mark if mark not in taken else next((m for m in _MARKS if m not in taken), "*")
                name = f"{place.name}, along row {direction}" if several and direction >= 0 else place.name
                made.append(Curve(name=name, mark=mark, color=at, points=points))
    return made


def _points(place: Place, direction: int) -> tuple[tuple[float, float], ...]:
    mine = [(r.norm, r.gradient) for r in place.readings if r.direction == direction]
    return tuple(sorted(((n, g) for n, g in mine if n > 0 and 0 < g < math.inf), reverse=True))


def axes(found: Amplification, drawn: Sequence[Curve]) -> Axes:
    """Wide enough for every point and both lines."""
    norms = [n for c in drawn for n, _ in c.points] or [1.0]
    gradients = [g for c in drawn for _, g in c.points] or [1.0]
    left, right = math.floor(math.log10(min(norms))), math.ceil(math.log10(max(norms)))
    return Axes(
        left=left, right=max(right, left + 1), bottom=math.floor(math.log10(min(*gradients, found.lost))),
        top=math.ceil(math.log10(max(*gradients, OVERFLOW))),
    )  # fmt: skip


def title(found: Amplification) -> list[str]:
    """What is drawn, and under which conditions."""
    tokens = [f"{found.num_loss_tokens} labels in the batch"] if found.num_loss_tokens else []
    scaled = (
        [f"embedding multiplied by {found.multiplier:.3g}"] if not math.isclose(found.multiplier, 1.0, rel_tol=1e-3) else []
    )
    median = f"median row {found.median_norm:.3g}"
    return ["gradient of one input row against its norm", median, *tokens, *scaled, f"clip bound {found.bound:g}"]


def closing(found: Amplification) -> list[str]:
    """One sentence a place: below which norm a step is lost, and below which it is zeroed; or that nothing was measured there."""
    return [f"{p.name}: {_predicted(p, found.lost)}{_elsewhere(p)}" for p in found.places]


def _predicted(place: Place, lost: float) -> str:
    if not place.is_measured:
        return "not measured (every gradient is exactly 0, as where no loss depends on the position)"
    if any(not math.isfinite(r.whole) for r in place.readings):
        return "gradients that are not finite"
    worst = max((r.whole for r in place.readings), default=0.0)
    if not worst > lost:
        return f"safe; the gradient stays below {max((r.gradient for r in place.readings), default=0.0):.3g}"
    spike, overflow = place.critical_norm(lost), place.critical_norm(OVERFLOW)
    if math.isnan(spike):
        return f"gradients up to {worst:.3g}, but not as 1/norm: no norm is predicted"
    words = f"a row below {spike:.2g} takes the step (finite spike above {lost:g})"
    if overflow > 0:
        return f"{words}, one below {overflow:.2g} zeroes it (float32 norm inf above 1.84e19)"
    return f"{words}; the gradient stays below {place.ceiling:.2g}, so nothing overflows"


def _elsewhere(place: Place) -> str:
    rest: list[Reading] = [r for r in place.readings if math.isfinite(r.whole) and r.whole > 10 * r.gradient and r.whole > 1e3]
    if not rest:
        return ""
    worst = max(rest, key=lambda r: r.whole)
    return f". Outside this row the gradient reaches {worst.whole:.2g}: other parameters (biases) amplify too"


def _plot(drawn: Sequence[Curve], span: Axes, lost: float, width: int, *, color: bool) -> list[str]:
    columns = width - 8
    grid: list[list[tuple[str, str]]] = [[(" ", "")] * columns for _ in range(_ROWS)]

    def row_of(gradient: float) -> int:
        return min(_ROWS - 1, max(0, _ROWS - 1 - round(span.up(gradient) * (_ROWS - 1))))

    for value, mark, words in ((lost, "-", "lost"), (OVERFLOW, "=", "overflow")):
        label = f" {words} {value:.3g} "
        grid[row_of(value)] = [(c, _BAD) for c in (mark * int(0.36 * columns) + label).ljust(columns, mark)[:columns]]
    for curve in drawn:
        places = [(round(span.across(n) * (columns - 1)), row_of(g)) for n, g in curve.points]
        for (column, row), (column2, row2) in itertools.pairwise(places):
            for i in range(column2 + 1, column):
                at = round(row2 + (row - row2) * (i - column2) / (column - column2))
                if grid[at][i][0] == " ":
                    grid[at][i] = ("·", _COLORS[curve.color])
    for curve in drawn:
        for norm, gradient in curve.points:
            grid[row_of(gradient)][round(span.across(norm) * (columns - 1))] = (curve.mark, _COLORS[curve.color])
    lines = []
    for i, cells in enumerate(grid):
        power = span.bottom + (span.top - span.bottom) * (_ROWS - 1 - i) / (_ROWS - 1)
        label = f"1e{round(power):+03d}" if i % 4 == 1 else ""
        painted = "".join(paint(mark, code, color=color) if code else mark for mark, code in cells)
        lines.append(f"{pad(label, 6, right=True)} {paint('│', _QUIET, color=color)}{painted}")
    left, right = f"1e{span.left:+03d}", f"1e{span.right:+03d}"
    lines.append(" " * 7 + "└" + "─" * columns)
    return [*lines, " " * 8 + left + "norm of the row".center(columns - len(left) - len(right)) + right]


def _table(found: Amplification, width: int) -> list[str]:
    """A line a row that was fed, a column a place."""
    heads = [_SHORT.get(p.name, p.name) for p in found.places]
    wide = max([10, *(len(h) for h in heads)]) + 2
    lines = ["norm".ljust(20) + "".join(pad(h, wide, right=True) for h in heads)]
    cells: dict[tuple[int, float, int], list[str]] = {}
    for i, place in enumerate(found.places):
        for r in place.readings:
            if not r.is_check:
                told = f"{r.gradient:.2g}" if place.is_measured else "-"
                cells.setdefault((r.direction, -r.norm, r.table_row), [""] * len(heads))[i] = told
    for (direction, norm, table_row), line in sorted(cells.items()):
        name = _norm(Reading(norm=-norm, gradient=0.0, table_row=table_row, direction=direction))
        lines.append(name.ljust(20) + "".join(pad(c, wide, right=True) for c in line))
    return [line[:width] for line in lines]


def _norm(reading: Reading) -> str:
    norm = "0" if reading.norm == 0 else f"{reading.norm:.2g}"
    if reading.table_row >= 0:
        return f"{norm} (row {reading.table_row})"
    return norm if reading.direction < 0 else f"{norm} (like row {reading.direction})"
