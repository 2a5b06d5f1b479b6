"""Solving columns of d loss / d head weight, each the whole d loss / d logits of one position. V classes, N positions, D dims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One position: its signed weight, its label, the target mass of it, whether another class ties, whether the rest is even."""

    weight: float
    label: int
    top: float
    tie: bool
    even: bool


def solve_columns(
    low_VD: torch.Tensor, high_VD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None,
    sizes: tuple[float, float], num: int,
) -> tuple[list[Column], float, float]:  # fmt: skip
    """The first `num` columns, the misfit relative to the change (0 for a cross-entropy), and the scale of the logits.

    `low_VD` and `high_VD` are gradients for hidden states size * e_i. Columns are handled in float64, a few at a time.
    """
    step = max(1, (1 << 22) // max(1, weight_VD.shape[0]))
    blocks = [slice(i, min(i + step, num)) for i in range(0, num, step)]

    def change(block: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = weight_VD[:, block].double().cpu()
        return low_VD[:, block].double().cpu() / sizes[0], high_VD[:, block].double().cpu() / sizes[1], rows

    def probability(rows: torch.Tensor, size: float, scale: float) -> torch.Tensor:
        z = rows * size if bias_V is None else rows * size + bias_V[:, None]
        return (z * scale).softmax(0)

    def misfit(scale: float, block: slice) -> float:
        g1, g2, rows = change(block)
        dp = probability(rows, sizes[1], scale) - probability(rows, sizes[0], scale)
        moved = g2 - g1
        w = (moved * dp).sum(0) / (dp * dp).sum(0).clamp_min(1e-300)
        total = float((moved**2).sum())
        return float(((moved - w * dp) ** 2).sum()) / total if total else 0.0

    scale = _best_scale(lambda s: misfit(s, blocks[0])) if blocks else 1.0
    found: list[Column] = []
    rest, total = 0.0, 0.0
    for block in blocks:
        g1, g2, rows = change(block)
        p1, p2 = probability(rows, sizes[0], scale), probability(rows, sizes[1], scale)
        moved, dp = (g2 - g1) / scale, p2 - p1
        w = (moved * dp).sum(0) / (dp * dp).sum(0).clamp_min(1e-300)
        rest += float(((moved - w * dp) ** 2).sum())
        total += float((moved**2).sum())
        y = p1 - g1 / scale / w.masked_fill(w == 0, 1.0)
        two = y.topk(2, dim=0)
        smallest = y.min(0).values
        for i in range(y.shape[1]):
            top, second = float(two.values[0, i]), float(two.values[1, i])
            even = abs(second - float(smallest[i])) <= 0.01 * abs(second) + 1e-6
            found.append(Column(weight=float(w[i]), label=int(two.indices[0, i]), top=top, tie=top - second < 1e-3, even=even))
    return found, (rest / total) ** 0.5 if total else 0.0, scale


def _best_scale(misfit: object) -> float:
    assert callable(misfit)
    steps = [2.0 ** (i / 2) for i in range(-16, 13)]
    at_one = misfit(1.0)
    if at_one < 1e-9:
        return 1.0
    best = min(steps, key=misfit)
    low, high = best / 2**0.5, best * 2**0.5
    for _ in range(40):
        a, b = low**0.618034 * high**0.381966, low**0.381966 * high**0.618034
        low, high = (low, b) if misfit(a) < misfit(b) else (a, high)
    found: float = (low * high) ** 0.5
    return found if misfit(found) < 0.5 * at_one else 1.0
