"""The reading at fed hidden states, for losses that never call the head (fused, chunked, patched, or a plain matrix product).

B examples, T positions, P = B * T, D hidden size, V classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.xray_columns import Column, solve_columns
from ghoststep.instruments.live.xray_feed import Fed, Fill, feeding
from ghoststep.instruments.live.xray_passes import Look, NothingFedError, Reading, read_twice
from ghoststep.instruments.live.xray_run import frozen, loss_graph
from ghoststep.instruments.live.xray_streams import Rows

if TYPE_CHECKING:
    import torch

MAX_GROUPS = 4
UNSTABLE = 0.05
HARD_ABOVE = 0.995
"""A target mass that near to 1 is 1: a soft cap moves the reading by less than that."""
_TIE = 1e-3


def read_hidden(look: Look, call: LiveCall) -> Reading | None:
    """Feed the last hidden state. With a log-softmax in the loss it is read there; else from the head's weight.

    None if no hidden state is seen or the loss does not depend on it. Cost: one forward to find the place, then two forwards
    with a log-softmax, else two, and two or three for each D positions (at most 4 times; none with `fast`, where the label is
    the nearest head row and smoothing cannot be told from a smaller weight).
    """
    with frozen(look.setup), feeding(look.core, (), look.embedding, look.grid, lambda *_: None) as feeder:
        loss_graph(look.setup, look.batch)
        module, width = feeder.last_module, 0 if feeder.last_hidden is None else int(feeder.last_hidden.shape[-1])
    if module is None:
        return None
    hidden = Look(
        setup=look.setup, batch=look.batch, core=look.core, modules=[module], embedding=look.embedding, grid=look.grid,
        num_classes=look.num_classes, hidden=True,
        fewest_classes=max(2, (call.num_table_rows or 2) // 2),
    )  # fmt: skip
    try:
        found = read_twice(hidden)
    except NothingFedError:
        return _read_fused(hidden, call, width)
    found.recipe, found.num_calls = "fed hidden states, log-softmax node", 0
    found.num_forward += 1
    return found


@dataclass(slots=True, kw_only=True)
class _Pulls:
    """d loss / d hidden [P, D] of one forward, and that with respect to the head's weight [V, D]."""

    hidden_PD: torch.Tensor
    weight_VD: torch.Tensor
    parameter: torch.nn.Parameter
    fed_loss: float


def _run(look: Look, candidates: list[torch.nn.Parameter], fill: Fill) -> _Pulls | None:
    """One forward and its backward as far as the hidden state and the head's weight."""
    import torch

    with frozen(look.setup), feeding(look.core, look.modules, look.embedding, look.grid, fill, keep_dtype=True) as feeder:
        for p in candidates:
            p.requires_grad_(True)
        loss = loss_graph(look.setup, look.batch)
        fed: list[Fed] = feeder.fed
        if len(fed) != 1 or not loss.requires_grad:
            return None
        hidden, *weights = torch.autograd.grad(loss, [fed[0].leaf, *candidates], allow_unused=True)
        moved = [(p, w) for p, w in zip(candidates, weights, strict=True) if w is not None]
        if hidden is None or not moved:
            return None
        parameter, weight = max(moved, key=lambda pw: float(pw[1].abs().max()))
        width = hidden.shape[-1]
        return _Pulls(
            hidden_PD=hidden.reshape(-1, width).double().cpu(),
            weight_VD=weight,
            parameter=parameter,
            fed_loss=float(loss.detach()),
        )


def _candidates(look: Look, num_dims: int, num_rows: int) -> list[torch.nn.Parameter]:
    """Parameters that may be the head's weight: as wide as the hidden state, with about as many rows as the input table."""
    return [p for p in look.core.parameters() if p.dim() == 2 and p.shape[1] == num_dims and p.shape[0] >= 0.5 * num_rows]


def _read_fused(look: Look, call: LiveCall, width: int) -> Reading | None:
    import torch

    candidates = _candidates(look, width, call.num_table_rows or 1)
    if not candidates:
        return None
    coarse = candidates[0].dtype.itemsize < 4
    probe = 1e-3 if coarse else 1e-6  # equal and tiny: a hidden state of zero would leave the weight without gradient
    direction_D = torch.randn(width, generator=torch.Generator().manual_seed(5))
    first = _run(look, candidates, lambda _, output: probe * direction_D.to(output.device).expand(output.shape))
    if first is None:
        return None
    weight_VD = first.parameter.detach()
    near = _nearest(first.hidden_PD, weight_VD)
    loaded = (near.length_P > 1e-7 * near.length_P.max()).nonzero().flatten()
    groups = [loaded[i : i + width] for i in range(0, loaded.numel(), width)][: 0 if look.setup.fast else MAX_GROUPS]
    solver = _Solver(
        look=look, parameter=first.parameter, weight_VD=weight_VD, bias_V=_bias(look, first.parameter),
        is_coarse=weight_VD.dtype.itemsize < 4,
    )  # fmt: skip
    columns: dict[int, Column] = {}
    for group in groups:
        solved = solver.solve(group)
        if solved is None:
            return None
        columns.update(zip(group.tolist(), solved, strict=True))
    residual, factor, passes = solver.misfit if groups else near.misfit, solver.factor, 1 + solver.num_forward
    if residual > UNSTABLE:  # weights that move with the logits (preferences): the columns of two passes cannot be compared
        columns, factor = {}, 1.0
    rows = _rows(near, columns, weight_VD, factor, first.fed_loss)
    return Reading(
        rows=[rows], residual=residual, recipe="fed hidden states", num_classes=weight_VD.shape[0], num_calls=0,
        num_forward=passes + 2, fed_loss=first.fed_loss, level=0.02 if solver.is_coarse else 1e-3,
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Solver:
    """Reads columns for groups of positions, and remembers the scale of the logits and the worst misfit."""

    look: Look
    parameter: torch.nn.Parameter
    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None
    is_coarse: bool
    factor: float = 1.0
    misfit: float = 0.0
    num_forward: int = 0

    def solve(self, group: torch.Tensor) -> list[Column] | None:
        """Two forwards with hidden states size * e_i. Large ones tell weight from smoothing best; a cap needs small ones."""
        spread = max(float(self.weight_VD.float().std()), 1e-30)
        unit = 2.0 ** round(-math.log2(spread))  # a power of two is exact in every dtype
        sizes = (unit * 4.0,) if self.is_coarse else (unit, unit / 16)
        low = _run(self.look, [self.parameter], _one_hot(group, unit / 1024))
        self.num_forward += 1
        best: tuple[list[Column], float, float] | None = None
        stretch = 1.0
        for size in (*sizes, None):
            if size is None:
                if best is None or abs(math.log(best[2])) < 0.1:
                    break
                stretch = 2.0 ** round(-math.log2(best[2]))  # scaled logits moved too little: feed more
            fed = (size or sizes[0]) * stretch
            high = _run(self.look, [self.parameter], _one_hot(group, fed))
            self.num_forward += 1
            if low is None or high is None:
                return None
            found = solve_columns(low.weight_VD, high.weight_VD, self.weight_VD, self.bias_V, (unit / 1024, fed), group.numel())
            if best is None or stretch != 1.0 or found[1] < best[1]:
                best = found
            if found[1] < 2e-5 and stretch == 1.0:
                break
        assert best is not None
        self.misfit, self.factor = max(self.misfit, best[1]), best[2]
        return best[0]


def _one_hot(group: torch.Tensor, size: float) -> Fill:
    """Hidden state of the i-th position of the group is size * e_i, all others 0: column i of d loss / d weight is its own."""
    import torch

    def fill(_: int, output: torch.Tensor) -> torch.Tensor:
        width = output.shape[-1]
        flat = torch.zeros(output.numel() // width, width, device=output.device)
        flat[group.to(output.device), torch.arange(group.numel(), device=output.device)] = size
        return flat.reshape(output.shape)

    return fill


def _bias(look: Look, weight: torch.nn.Parameter) -> torch.Tensor | None:
    for module in look.core.modules():
        if getattr(module, "weight", None) is weight and isinstance(getattr(module, "bias", None), type(weight)):
            bias: Any = module.bias
            return None if bias is None else bias.detach().double().cpu()
    return None


@dataclass(slots=True, kw_only=True)
class _Nearest:
    """The centred head row that each hidden gradient points away from. All [P]."""

    label_P: torch.Tensor
    length_P: torch.Tensor
    pull_P: torch.Tensor
    tie_P: torch.Tensor
    misfit: float


def _nearest(hidden_PD: torch.Tensor, weight_VD: torch.Tensor) -> _Nearest:
    """g = w (mean W - W_label): the label is the row whose direction from the mean fits best, w the ratio of lengths."""
    import torch

    centred = weight_VD.double().cpu()
    centred = centred - centred.mean(0)
    lengths_V = centred.norm(dim=-1).clamp_min(1e-300)
    parts = []
    rest, total = 0.0, float(hidden_PD.square().sum())
    step = max(1, (1 << 24) // max(1, centred.shape[0]))
    for start in range(0, hidden_PD.shape[0], step):
        g = hidden_PD[start : start + step]
        fit = (g @ centred.T) / lengths_V / g.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        strength = fit.abs()
        two = strength.topk(2, -1)
        label = two.indices[:, 0]
        pull = -(g * centred[label]).sum(-1) / lengths_V[label] ** 2
        rest += float((g + pull[:, None] * centred[label]).square().sum())
        parts.append((label, g.norm(dim=-1), pull, two.values[:, 0] - two.values[:, 1] < _TIE * 0.01))
    label, length, pull, tie = (torch.cat(p) for p in zip(*parts, strict=True))
    return _Nearest(label_P=label, length_P=length, pull_P=pull, tie_P=tie, misfit=math.sqrt(rest / total) if total else 0.0)


def _rows(near: _Nearest, columns: dict[int, Column], weight_VD: torch.Tensor, factor: float, fed_loss: float) -> Rows:
    """Labels of the columns where a position has one. Weights of the pulls where the targets are hard, else of the columns.

    A pull at hidden state 0 knows no cap and is exact; a column's weight is a difference of rounded numbers. Positions without
    a column take the share of the label from those that have one.
    """
    import torch

    num, num_classes = near.label_P.numel(), weight_VD.shape[0]
    is_coarse = weight_VD.dtype.itemsize < 4
    loaded = near.length_P > 1e-7 * near.length_P.max()
    tops = sorted(c.top for c in columns.values() if c.weight)
    top = tops[len(tops) // 2] if tops else 1.0
    is_hard = top > (0.95 if is_coarse else HARD_ABOVE)
    top = 1.0 if is_hard else top
    share = max((top - 1 / num_classes) / (1 - 1 / num_classes), 1e-6)
    label = torch.where(loaded, near.label_P, -1)
    tops_P = torch.full((num,), top, dtype=torch.float64)
    tie, even = near.tie_P & loaded, torch.full((num,), not is_hard)
    for place, column in columns.items():
        label[place], tie[place], even[place] = column.label, column.tie, column.even
        tops_P[place] = 1.0 if is_hard and column.top > 0.9 else column.top
    pull = torch.where(loaded, near.pull_P, 0.0)
    if is_hard and columns:
        factor = _exact_factor(factor, float(pull.sum()) * math.log(num_classes) / fed_loss if fed_loss else math.nan)
    weight = (pull / factor / share).nan_to_num(0.0, 0.0, 0.0)
    for place, column in columns.items():
        if not is_coarse and not (is_hard and column.label == int(near.label_P[place])):
            weight[place] = column.weight
    return Rows(places=torch.arange(num), weight=weight, label=label, top=tops_P, ambiguous=tie, even=even)


def _exact_factor(fitted: float, by_loss: float) -> float:
    """The scale of the logits. 1 if the fit is near it (as with a cap); else what loss(0) = ln V * sum w says, if it agrees."""
    if abs(fitted - 1) < 0.01:
        return 1.0
    return by_loss if abs(by_loss / fitted - 1) < 0.01 else fitted
