"""The reading at the fed logits themselves, for losses without a log-softmax node (own kernels, logsumexp, gather).

N rows, V classes, K sketch columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.instruments.live.xray_rows import chunks, sketch, sketch_matrix

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class Pass:
    """d loss / d logits of one call in one pass: sketch [N, K] and, in the first pass, its extremes [N]."""

    sketch_NK: torch.Tensor
    label_N: torch.Tensor
    at_label_N: torch.Tensor
    tie_N: torch.Tensor
    live_V: torch.Tensor
    finite_N: torch.Tensor


def read_pass(
    grads: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor], labels: list[torch.Tensor] | None
) -> list[Pass]:
    """Reduce each leaf's gradient. With uniform logits the label is where the gradient is most extreme against its sign.

    `labels` are those of the first pass; then `at_label_N` is the gradient there.
    """
    import torch

    found = []
    for k, (grad, leaf) in enumerate(zip(grads, leaves, strict=True)):
        width = leaf.shape[-1]
        rows = torch.zeros_like(leaf) if grad is None else grad
        rows = rows.reshape(-1, width)
        parts, live = [], torch.zeros(width, dtype=torch.bool, device=rows.device)
        start = 0
        for raw in chunks(rows, torch.float64):
            x = raw.nan_to_num(0.0, 0.0, 0.0)
            live |= (x != 0).any(0)
            low, high = x.topk(2, -1, largest=False), x.topk(2, -1)
            negative = high.values[:, 0] > -low.values[:, 0]
            label = torch.where(negative, high.indices[:, 0], low.indices[:, 0])
            two = torch.where(negative[:, None], high.values, low.values)
            if labels is not None:
                label = labels[k][start : start + len(x)].to(x.device).clamp_min(0)
            parts.append((label, x.gather(-1, label[:, None])[:, 0], (two[:, 0] - two[:, 1]).abs() <= 1e-6 * two[:, 0].abs(),
                          raw.isfinite().all(-1)))  # fmt: skip
            start += len(x)
        label, at_label, tie, finite = (torch.cat(p).cpu() for p in zip(*parts, strict=True))
        found.append(
            Pass(
                sketch_NK=sketch(rows, sketch_matrix(width, rows.device), exact=True),
                label_N=label,
                at_label_N=at_label,
                tie_N=tie,
                live_V=live.cpu(),
                finite_N=finite,
            )
        )
    return found


@dataclass(slots=True, kw_only=True)
class Solved:
    """Weight, target mass of the label and squared misfit of each row [N]; the scale of the logits that fits best."""

    weight_N: torch.Tensor
    top_N: torch.Tensor
    misfit: float
    change: float


def solve(one: Pass, two: Pass, base_V: torch.Tensor, bump: float, scale: float) -> Solved:
    """w = <G2 - G1, p2 - p1> / |p2 - p1|^2 in the sketch, y = p2 - G2 / w at the label, for logits scaled by `scale`.

    The second pass fed `base_V`, and `bump` more at the label of the first. Classes without gradient take no part.
    """
    import torch

    matrix = sketch_matrix(base_V.numel(), torch.device("cpu"))
    live = one.live_V | two.live_V
    z_V = (base_V.double() * scale).masked_fill(~live, -torch.inf)
    e_V = (z_V - z_V.max()).exp()
    extra = torch.exp(torch.tensor(bump * scale, dtype=torch.float64)) - 1
    uniform_V = live.double() / live.sum().clamp_min(1)
    label = one.label_N
    total_N = e_V.sum() + extra * e_V[label]
    p2_NK = ((e_V @ matrix)[None] + extra * e_V[label, None] * matrix[label]) / total_N[:, None]
    change_NK = p2_NK - (uniform_V @ matrix)[None]
    moved_NK = (two.sketch_NK - one.sketch_NK) / scale
    weight = (moved_NK * change_NK).sum(-1) / (change_NK * change_NK).sum(-1).clamp_min(1e-300)
    rest = moved_NK - weight[:, None] * change_NK
    p1 = 1.0 / live.sum().clamp_min(1)
    safe = torch.where(weight == 0, 1.0, weight)
    top = p1 - one.at_label_N / scale / safe
    return Solved(weight_N=weight, top_N=top, misfit=float((rest**2).sum()), change=float((moved_NK**2).sum()))


def best_scale(passes: Sequence[tuple[Pass, Pass]], base_V: torch.Tensor, bump: float) -> float:
    """The factor between fed and final logits under which the loss is nearest to a cross-entropy; 1 if nothing is clearly better."""

    def misfit(scale: float) -> float:
        solved = [solve(a, b, base_V, bump, scale) for a, b in passes]
        change = sum(s.change for s in solved)
        return sum(s.misfit for s in solved) / change if change else 0.0

    if misfit(1.0) < 1e-8:
        return 1.0
    steps = [2.0 ** (i / 2) for i in range(-16, 13)]
    best = min(steps, key=misfit)
    low, high = best / 2**0.5, best * 2**0.5
    for _ in range(40):  # golden section on the logarithm
        a, b = low**0.618034 * high**0.381966, low**0.381966 * high**0.618034
        low, high = (low, b) if misfit(a) < misfit(b) else (a, high)
    found = (low * high) ** 0.5
    return float(found) if misfit(found) < 0.5 * misfit(1.0) else 1.0
