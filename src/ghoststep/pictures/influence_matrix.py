"""Who sees whom, drawn: one line a target, one column a source, the forbidden region outlined."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from ghoststep.pictures.cells import (
    FORBIDDEN_ERROR,
    MIDDLE,
    STRONG,
    WEAK,
    Cells,
    Forbidden,
    cells,
    forbidden_pairs,
    shade,
    strongest_forbidden,
)
from ghoststep.pictures.words import TokenText, cut, pad, paint, shown, wrap

if TYPE_CHECKING:
    from ghoststep.evidence.batch import BatchFacts
    from ghoststep.evidence.influence import Influence

_SHADES = "·░▒▓█"
_BLUES = ("2", "38;5;24", "38;5;31", "38;5;38", "38;5;81")
_LEAK, _EDGE, _QUIET = "1;31", "31", "2"
_EDGE_MARK = "│"


def influence_text(
    influence: Influence,
    batch: BatchFacts | None,
    *,
    width: int = 80,
    color: bool = False,
    token_text: TokenText | None = None,
) -> str:
    """The influence matrix for a terminal, ending with a line feed.

    Each line is a target (who looks), each column a source (who is seen). Shades are powers of ten of the relative influence, as
    the legend says; "│" is the edge of what must not be seen, "X" an influence inside it. Matrices that are too wide are shown in
    blocks, each by its strongest pair, allowed and forbidden pairs apart. A blank was not looked at; "·" was, and does not move.

    Args:
        influence: as measured; `matrix_ST` may hold NaN.
        batch: for padding, documents and token ids; None shows positions only.
        width: columns, at least 40. color: ANSI colours. token_text: from id to string, shown beside each line.
    Cost: O(S·T) once, then O(width²).
    """
    width = max(40, width)
    forbidden = forbidden_pairs(influence, batch)
    names = _names(influence, batch, token_text, limit=10)
    margin = max([len(str(max(influence.matrix_ST.shape, default=0))), *(_size(n) for n in names)], default=1) + 2
    drawn = cells(influence, forbidden, max_cells=(width - margin) // 2)
    if drawn.size > 1:  # a block has no token of its own
        names = [str(i) for i in range(0, influence.matrix_ST.shape[1], drawn.size)]
    lines = [*wrap(_title(influence, drawn), width), _ruler(drawn, margin)]
    for k, name in enumerate(names[: len(drawn.allowed_KL)]):
        dim = bool(drawn.padding_K[k])
        label = paint(pad(name, margin - 1, right=True), _QUIET, color=color and dim)
        lines.append(f"{label} {_line(drawn, k, influence.floor, color=color, dim=dim)}".rstrip())
    lines += wrap(_legend(influence, forbidden, drawn), width)
    lines += wrap([_verdict(influence, forbidden)], width)
    return "\n".join(lines) + "\n"


def influence_svg(
    influence: Influence, batch: BatchFacts | None, *, token_text: TokenText | None = None, max_cells: int = 96
) -> str:
    """The same picture as a self-contained SVG: no script, nothing loaded, light and dark. At most `max_cells` blocks a side."""
    from ghoststep.pictures.influence_drawing import draw  # lazy: the terminal does not need it

    forbidden = forbidden_pairs(influence, batch)
    drawn = cells(influence, forbidden, max_cells)
    names = _names(influence, batch, token_text, limit=14) if drawn.size == 1 and len(drawn.allowed_KL) <= 40 else []
    title = "  ".join(_title(influence, drawn))
    return draw(drawn, names, title=title, verdict=_verdict(influence, forbidden), floor=influence.floor, words=forbidden.words)


def _size(name: str) -> int:
    from ghoststep.pictures.words import columns

    return columns(name)


def _names(influence: Influence, batch: BatchFacts | None, token_text: TokenText | None, limit: int) -> list[str]:
    """Position, and the token where strings are known, of every target."""
    num_targets, example = influence.matrix_ST.shape[1], influence.matrix_example
    known = batch is not None and token_text is not None and example < len(batch.ids_BT)
    ids = batch.ids_BT[example, :num_targets].tolist() if known and batch is not None else []
    digits = len(str(max(num_targets - 1, 0)))
    return [
        f"{t:>{digits}} {pad(shown(ids[t], token_text, limit), limit)}" if t < len(ids) else f"{t:>{digits}}"
        for t in range(num_targets)
    ]


def _title(influence: Influence, drawn: Cells) -> list[str]:
    blocks = f"blocks of {drawn.size} positions" if drawn.size > 1 else ""
    pieces = ["who sees whom", f"example {influence.matrix_example}", f"{influence.mode} mode", blocks]
    return [p for p in [*pieces, "↓ looks  → is seen"] if p]


def _ruler(drawn: Cells, margin: int) -> str:
    """Positions of the sources, as many as fit without touching."""
    num_cells = drawn.allowed_KL.shape[1] if drawn.allowed_KL.ndim == 2 else 0
    text, step = " " * margin, 5
    while 2 * step <= len(str(num_cells * drawn.size)) + 1:
        step *= 2
    for k in range(0, num_cells, step):
        number = str(k * drawn.size)
        if margin + 2 * k + len(number) <= margin + 2 * num_cells:
            text = pad(text, margin + 2 * k) + number
    return text.rstrip()


def _line(drawn: Cells, k: int, floor: float, *, color: bool, dim: bool) -> str:
    """One target. Each cell is its glyph and a gap, which holds the edge where the forbidden region begins or ends."""
    inside = drawn.is_forbidden_KL[k].tolist()
    glyphs = [
        _glyph(float(allowed), float(bad), floor, only_bad=only_bad)
        for allowed, bad, only_bad in zip(drawn.allowed_KL[k], drawn.forbidden_KL[k], inside, strict=True)
    ]
    pieces: list[tuple[str, str]] = []
    for i, (glyph, code) in enumerate(glyphs):
        style = _QUIET if dim else code
        if i + 1 < len(inside) and inside[i] != inside[i + 1]:
            pieces += [(style, glyph), (_EDGE, _EDGE_MARK)]
        else:
            pieces.append((style, glyph + (" " if glyph in "· " else glyph)))
    runs = groupby(pieces, key=lambda piece: piece[0])
    return "".join(paint("".join(text for _, text in run), style, color=color) for style, run in runs)


def _glyph(allowed: float, bad: float, floor: float, *, only_bad: bool) -> tuple[str, str]:
    leak = shade(bad, floor)
    if leak:
        return ("X" if bad >= FORBIDDEN_ERROR else "x"), _LEAK
    level = leak if only_bad else shade(allowed, floor)
    return (" ", _QUIET) if level is None else (_SHADES[level], _BLUES[level])


def _legend(influence: Influence, forbidden: Forbidden, drawn: Cells) -> list[str]:
    import numpy as np

    pieces = [f"█ ≥ {STRONG:g}", f"▓ ≥ {MIDDLE:g}", f"▒ ≥ {WEAK:g}", f"░ > {influence.floor:.0e}", "· not seen"]
    if np.isnan(influence.matrix_ST).any():
        pieces.append("blank: not looked at")
    if forbidden.words:
        pieces += [f"│ edge of {_and(forbidden.words)}", f"X seen all the same (x: under {FORBIDDEN_ERROR:g})"]
    if drawn.size > 1:
        pieces.append("a block shows its strongest pair")
    return pieces


def _verdict(influence: Influence, forbidden: Forbidden) -> str:
    if not forbidden.words:
        return f"nothing is forbidden here: {cut(influence.intent.source, 200)}"
    worst = strongest_forbidden(influence, forbidden)
    if worst is None:
        return f"no position is seen to look at {_and(forbidden.words, 'or')}"
    value, source, target = worst
    return f"position {target} looks at position {source}, which it must not: {value:.2g} of what its own past does"


def _and(words: tuple[str, ...], last: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
