"""The batch as the loss sees it: each token with the label it is trained to predict below it, and that label's weight.

B examples, T positions. The positions of a `LossXray` are those of `BatchFacts.ids_BT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.pictures.words import TokenText, columns, pad, paint, shown, wrap

if TYPE_CHECKING:
    from ghoststep.evidence.batch import BatchFacts
    from ghoststep.evidence.loss import LossXray

_GREENS = ("38;5;65", "38;5;71", "38;5;40", "1;38;5;46")
_MINUS, _QUIET, _BAD = "38;5;141", "2", "1;31"
_TOKEN_LIMIT = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One position. labels: the label of each target of the position (several with further heads), "" where none.

    strength: |weight| over the largest one, 0..1, or 0. own: the label is the position's own token.
    """

    position: int
    token: str
    labels: tuple[str, ...]
    weight: float
    strength: float
    is_padding: bool
    starts_document: bool


def label_text(
    xray: LossXray,
    batch: BatchFacts,
    *,
    example: int = 0,
    width: int = 80,
    color: bool = False,
    token_text: TokenText | None = None,
    max_positions: int = 512,
) -> str:
    """One example for a terminal, ending with a line feed: position, token, label and weight below one another, wrapped.

    Positions without loss have "·" as label and no weight; "PAD" marks padding, "!" a padded position that carries loss, "?" a
    label that could not be told from others, "│" the start of another announced document. Weights are those of the loss itself
    (1/N for a mean over N tokens), signed.

    Args:
        xray, batch: facts about the same batch. example: which one; `IndexError` if the batch has fewer.
        width: columns, at least 40. color: text coloured by weight. token_text: from id to string; ids without it.
        max_positions: of a longer example the first ones are shown, and it says so.
    """
    width = max(40, width)
    made = _columns(xray, batch, example, token_text, max_positions)
    lines = wrap(_title(xray, batch, example), width)
    names = ["", "token", *_label_names(xray), "weight"]
    margin = max(map(len, names)) + 1
    for group in _groups(made, width - margin):
        lines += [*_strip(group, names, margin, color=color), ""]
    return "\n".join(line.rstrip() for line in [*lines, *_closing(xray, batch, example, made, width)]) + "\n"


def label_svg(
    xray: LossXray, batch: BatchFacts, *, example: int = 0, token_text: TokenText | None = None, max_positions: int = 512
) -> str:
    """The same as a self-contained SVG: each token on a ground as strong as its weight. Arguments as for `label_text`."""
    from ghoststep.pictures.label_drawing import draw  # lazy: the terminal does not need it

    made = _columns(xray, batch, example, token_text, max_positions)
    title = "  ".join(_title(xray, batch, example))
    return draw(made, _label_names(xray), title=title, closing=_closing(xray, batch, example, made, 84))


def _columns(xray: LossXray, batch: BatchFacts, example: int, token_text: TokenText | None, max_positions: int) -> list[Column]:
    import numpy as np

    weight_T = np.nan_to_num(xray.weight_BT[example])
    further = [(f.target_BT[example], f.ambiguous_BT[example]) for f in xray.further]
    targets = [(xray.target_BT[example], xray.ambiguous_BT[example]), *further]
    largest = float(np.abs(xray.weight_BT[np.isfinite(xray.weight_BT)]).max(initial=0.0)) or 1.0
    documents = batch.document_BT
    made = []
    for t in range(min(len(weight_T), max_positions)):
        made.append(
            Column(
                position=t,
                token=shown(int(batch.ids_BT[example, t]), token_text, _TOKEN_LIMIT),
                labels=tuple(
                    shown(int(target[t]), token_text, _TOKEN_LIMIT) + ("?" if unsure[t] and target[t] >= 0 else "")
                    for target, unsure in targets
                ),
                weight=float(xray.weight_BT[example, t]),
                strength=abs(float(weight_T[t])) / largest,
                is_padding=batch.padding_BT is not None and bool(batch.padding_BT[example, t]),
                starts_document=documents is not None and t > 0 and bool(documents[example, t] != documents[example, t - 1]),
            )
        )
    return made


def _label_names(xray: LossXray) -> list[str]:
    return ["label", *(f"label {i}" for i in range(2, len(xray.further) + 2))]


def _title(xray: LossXray, batch: BatchFacts, example: int) -> list[str]:
    return ["what the loss trains on", f"example {example} of {len(batch.ids_BT)}", xray.kind.value, f"loss {xray.loss:.4g}"]


def weight_words(weight: float) -> str:
    """ "0.083" short: ".083", "-.083", "1", "1.2e-05"; "" for none, "nan" as it is."""
    if weight == 0:
        return ""
    text = f"{weight:.2g}" if abs(weight) < 1000 else f"{weight:.1e}"
    return text.replace("0.", ".", 1) if text.lstrip("-").startswith("0.") else text


def _groups(made: Sequence[Column], room: int) -> list[list[Column]]:
    """Columns that fit side by side."""
    groups: list[list[Column]] = [[]]
    used = 0
    for column in made:
        needed = _width(column) + 2
        if groups[-1] and used + needed > room:
            groups.append([])
            used = 0
        groups[-1].append(column)
        used += needed
    return groups if groups[0] else []


def _entries(column: Column) -> list[str]:
    weight = weight_words(column.weight)
    if column.is_padding:
        weight = f"PAD!{weight}" if weight else "PAD"
    return [str(column.position), column.token, *column.labels, weight]


def _width(column: Column) -> int:
    return max(columns(e) for e in _entries(column))


def _strip(group: Sequence[Column], names: Sequence[str], margin: int, *, color: bool) -> list[str]:
    lines = []
    for i, name in enumerate(names):
        line = paint(pad(name, margin), _QUIET, color=color)
        for column in group:
            edge = paint("│", _BAD if i else _QUIET, color=color) if column.starts_document else " "
            line += edge + paint(pad(_entries(column)[i], _width(column)), _style(column, i), color=color) + " "
        lines.append(line)
    return lines


def _style(column: Column, line: int) -> str:
    if line == 0:
        return _QUIET
    if column.weight == 0:
        return _QUIET
    if column.is_padding or column.weight != column.weight:
        return _BAD
    return _MINUS if column.weight < 0 else _GREENS[min(3, int(column.strength * 4))]


def _closing(xray: LossXray, batch: BatchFacts, example: int, made: Sequence[Column], width: int) -> list[str]:
    """Sums over the whole example, also where only its start is shown."""
    import numpy as np

    weight_T = xray.weight_BT[example]
    carries = weight_T != 0
    pieces = [
        f"{int(carries.sum())} of {len(weight_T)} positions carry loss",
        f"weights add up to {float(np.nansum(weight_T)):.3g}",
    ]
    if batch.padding_BT is not None:
        padded = batch.padding_BT[example].astype(bool)
        pieces.append(f"padding: {int(padded.sum())}, with loss: {int((padded & carries).sum())}")
    if (weight_T < 0).any():
        pieces.append(f"away from the label: {int((weight_T < 0).sum())}")
    if any("?" in label for c in made for label in c.labels):
        pieces.append("?: could not be told from other labels")
    if len(made) < len(weight_T):
        pieces.append(f"the first {len(made)} positions are shown")
    return wrap(pieces, width)
