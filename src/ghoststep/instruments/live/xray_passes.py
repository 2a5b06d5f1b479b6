"""The two passes of the loss X-ray over fed outputs, and their reading at log-softmax nodes or at the fed logits themselves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.instruments.live.xray_feed import Fed, Feeder, Fill, feeding, places
from ghoststep.instruments.live.xray_logits import Pass, best_scale, read_pass, solve
from ghoststep.instruments.live.xray_nodes import (
    NodeReading,
    is_linear_in,
    log_softmax_nodes,
    read_nodes,
    rows_by_order,
    rows_of_leaves,
)
from ghoststep.instruments.live.xray_path import has_softmax_before, positions_of_a_row, rows_by_graph
from ghoststep.instruments.live.xray_rows import is_tie
from ghoststep.instruments.live.xray_run import frozen, loss_graph
from ghoststep.instruments.live.xray_streams import Rows
from ghoststep.subjects.setup import Setup
from ghoststep.subjects.setup_batches import Batch

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class Look:
    """What is run and fed: the modules whose outputs are replaced, and the grid of positions of the batch.

    `hidden`: they give hidden states, not logits. `fewest_classes`: a log-softmax over fewer is not one over the vocabulary.
    Seen on the way: `softmaxed`: a softmax stands before the log-softmax; `mixed`: see `positions_of_a_row`.
    """

    setup: Setup
    batch: Batch
    core: torch.nn.Module
    modules: Sequence[torch.nn.Module]
    embedding: torch.nn.Module | None
    grid: Sequence[torch.Size]
    num_classes: int | None
    hidden: bool = False
    keep_dtype: bool = False
    fewest_classes: int = 2
    softmaxed: bool = False
    mixed: int = 0


@dataclass(slots=True, kw_only=True)
class Reading:
    """Rows with their targets, and how far the loss is from a cross-entropy. `masked_V`: classes without probability.
    `level`: relative differences of weights below it are rounding."""

    rows: list[Rows]
    residual: float
    recipe: str
    num_classes: int
    num_calls: int
    masked_V: torch.Tensor | None = None
    smoothing_on_masked: float = 0.0
    num_nonfinite: int = 0
    num_forward: int = 0
    fed_loss: float = math.nan
    level: float = 1e-3
    leaf_labels: list[torch.Tensor] = field(default_factory=list)


class NothingFedError(Exception):
    """The loss never called the fed modules, or does not depend on what was fed."""

    def __init__(self, called: bool) -> None:
        super().__init__("called" if called else "not called")
        self.called = called


def read_twice(look: Look, *, once: bool = False) -> Reading:
    """Feed zeros, then a random direction with the found labels raised. `once`: weights and labels only, residual NaN, or 0 where
    the graph itself proves a cross-entropy (then `fast` spares the second pass too).

    Raises `NothingFedError`; `CannotLook` when rows cannot be placed. Cost: two forwards (one with `once`; three for scaled logits
    without a log-softmax), no backward through the model; peak memory: a forward without activations and the logits three times.
    """
    first, sketches, leaf_pass = _first(look)
    if once or not (sketches or leaf_pass) or (look.setup.fast and first.residual == 0.0):
        return first
    if sketches:
        with frozen(look.setup), _fed(look, _raise_labels(look, first.leaf_labels, 1.0)) as feeder:
            loss, leaves = _again(look, first, feeder)
            again, _ = read_nodes(loss, _nodes(look, loss, leaves), leaves, with_order=False)
        first.residual = _moved(sketches, [r.sketch_NK for r in again])
        return first
    scale = _second_at_leaves(look, first, leaf_pass, 1.0)
    if abs(math.log(scale)) > 0.1:
        # Logits that are scaled before the loss moved too little or too much: once more with what gives them their usual size.
        _second_at_leaves(look, first, leaf_pass, 1.0 / scale)
    return first


def _nodes(look: Look, loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[Any]:
    return log_softmax_nodes(loss, look.fewest_classes, None if look.hidden else leaves[0].shape[-1])


def _again(look: Look, reading: Reading, feeder: Feeder) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = loss_graph(look.setup, look.batch)
    reading.num_forward += 1
    if not loss.requires_grad:
        raise CannotLook("the loss depended on the fed outputs in one run and not in the next")
    return loss, [f.leaf for f in feeder.fed]


def _base(width: int) -> torch.Tensor:
    import torch

    return torch.randn(width, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def _raise_labels(look: Look, labels: list[torch.Tensor], stretch: float) -> Fill:
    """A fixed random direction, and ln V more at each row's label, so that it has about half of the probability."""
    import torch

    def fill(call_number: int, output: torch.Tensor) -> torch.Tensor:
        width = output.shape[-1]
        base = (_base(width) * stretch).float().to(output.device).expand(output.shape)
        if look.hidden or call_number >= len(labels) or labels[call_number].numel() * width != output.numel():
            return base
        label = labels[call_number].to(output.device).reshape((*output.shape[:-1], 1))
        return torch.scatter_add(base, -1, label.clamp_min(0), (label >= 0).float() * math.log(width) * stretch)

    return fill


def _second_at_leaves(look: Look, reading: Reading, one: list[Pass], stretch: float) -> float:
    """The second pass of the reading at the fed logits; its result is put into `reading`. Returns the scale of the logits."""
    import torch

    with frozen(look.setup), _fed(look, _raise_labels(look, reading.leaf_labels, stretch)) as feeder:
        loss, leaves = _again(look, reading, feeder)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        two = read_pass(grads, leaves, [p.label_N for p in one])
    if [p.label_N.numel() for p in one] != [p.label_N.numel() for p in two]:
        raise CannotLook("the loss calls the head with other positions in each run")
    return _solved(reading, list(zip(one, two, strict=True)), stretch)


def _fed(look: Look, fill: Fill) -> contextlib.AbstractContextManager[Feeder]:
    return feeding(look.core, look.modules, look.embedding, look.grid, fill, keep_dtype=look.hidden or look.keep_dtype)


def _first(look: Look) -> tuple[Reading, list[torch.Tensor], list[Pass]]:
    """The pass over zeros: the reading so far, and what the second pass is compared with (at nodes or at the leaves)."""
    import torch

    with frozen(look.setup), _fed(look, lambda *_: None) as feeder:
        loss = loss_graph(look.setup, look.batch)
        leaves = [f.leaf for f in feeder.fed]
        if not leaves or not loss.requires_grad:
            raise NothingFedError(called=bool(leaves))
        width = leaves[0].shape[-1]
        reading = Reading(rows=[], residual=math.nan, recipe="", num_classes=width, num_calls=len(leaves), num_forward=1)
        reading.fed_loss = float(loss.detach())
        nodes = _nodes(look, loss, leaves)
        links = rows_by_graph(nodes, leaves)
        readings, arrived = read_nodes(loss, nodes, leaves, with_order=links is None) if nodes else ([], [])
        if readings and links is None:
            links = rows_by_order(readings, leaves, arrived)
        if readings and links is None:
            links = rows_of_leaves(loss, readings, leaves)
            look.mixed = positions_of_a_row(loss, readings, leaves) if links is None and not look.hidden else 0
        look.softmaxed = not look.hidden and has_softmax_before(nodes)
        if links is not None:
            reading.recipe = "log-softmax node"
            reading.residual = 0.0 if is_linear_in(loss, nodes) else math.nan
            reading.leaf_labels = [torch.full((f.leaf[..., 0].numel(),), -1, dtype=torch.int64) for f in feeder.fed]
            _take_nodes(look, reading, readings, links, [a.live_V for a in arrived], feeder.fed)
            return reading, [r.sketch_NK for r in readings], []
        if look.hidden:
            raise NothingFedError(called=True)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        passes = read_pass(grads, leaves, None)
        reading.recipe = "fed logits"
        reading.leaf_labels = [p.label_N for p in passes]
        reading.rows = [_placed(look, f) for f in feeder.fed]
    return reading, [], passes


def _placed(look: Look, fed: Fed) -> Rows:
    """Rows without targets yet, at their places."""
    import torch

    where = _places(look, fed)
    nothing = torch.zeros(where.numel(), dtype=torch.float64)
    return Rows(places=where, weight=nothing, label=nothing.long(), top=nothing, ambiguous=nothing.bool(), even=nothing.bool())


def _places(look: Look, fed: Fed) -> torch.Tensor:
    width = max(s[1] for s in look.grid)
    offsets = [sum(s[0] for s in look.grid[:k]) for k in range(len(look.grid))]
    found = places(fed, look.grid, offsets, width)
    if found is None:
        shape, ids = tuple(fed.leaf.shape[:-1]), [tuple(s) for s in look.grid]
        raise CannotLook(
            f"a call of the head over {shape} positions cannot be matched to the batch's {ids}: its inputs are not the last "
            "hidden states seen there"
        )
    return found


def _take_nodes(
    look: Look, reading: Reading, readings: Sequence[NodeReading],
    links: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]], live: Sequence[torch.Tensor], fed: Sequence[Fed],
) -> None:  # fmt: skip
    import torch

    total = sum(float(r.targets.weight_N.abs().sum()) for r in readings)
    for node, per_leaf in zip(readings, links, strict=True):
        found = node.targets
        reading.num_nonfinite += int((~found.finite_N).sum())
        mass = float((found.masked_mass_N * found.weight_N.abs()).sum())
        reading.smoothing_on_masked += mass / total if total else 0.0
        for k, (leaf_rows, node_rows) in enumerate(per_leaf):
            if not leaf_rows.numel():
                continue
            columns = torch.arange(node.num_classes) if look.hidden else _columns(node, live[k : k + 1], fed[k].leaf.shape[-1])
            label = torch.where(found.label_N >= 0, columns[found.label_N.clamp_min(0)], -1)
            if not look.hidden:
                reading.leaf_labels[k][leaf_rows] = label[node_rows]
            else:
                reading.num_classes = node.num_classes
            if node.masked_V is not None or columns.numel() < reading.num_classes:
                reading.masked_V = _masked(node, columns, reading.num_classes)
            reading.rows.append(
                Rows(
                    places=_places(look, fed[k])[leaf_rows],
                    weight=found.weight_N[node_rows],
                    label=label[node_rows],
                    top=found.top_N[node_rows],
                    ambiguous=is_tie(found)[node_rows],
                    even=found.even_N[node_rows],
                )
            )


def _columns(node: NodeReading, live: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Which class of the head each class of the log-softmax is: all, or those that were kept before it."""
    import torch

    if node.num_classes == width:
        return torch.arange(width)
    kept = live[0].nonzero().flatten()
    if kept.numel() == node.num_classes:
        return kept
    if kept.numel() == 0 or int(kept[-1]) < node.num_classes:
        return torch.arange(node.num_classes)
    raise CannotLook(f"the loss takes {node.num_classes} of {width} classes, and which ones cannot be told")


def _masked(node: NodeReading, columns: torch.Tensor, width: int) -> torch.Tensor:
    import torch

    masked = torch.ones(width, dtype=torch.bool)
    masked[columns] = False if node.masked_V is None else node.masked_V
    return masked


def _moved(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    if [b.shape for b in before] != [a.shape for a in after]:
        raise CannotLook("the loss takes other positions in each run")
    moved = sum(float(((a - b) ** 2).sum()) for a, b in zip(after, before, strict=True))
    length = sum(float((b**2).sum()) for b in before)
    return math.sqrt(moved / length) if length else 0.0


def _solved(reading: Reading, pairs: list[tuple[Pass, Pass]], stretch: float) -> float:
    import torch

    width = reading.num_classes
    base, bump = _base(width) * stretch, math.log(width) * stretch
    scale = best_scale(pairs, base, bump)
    solved = [solve(a, b, base, bump, scale) for a, b in pairs]
    largest = max((float(s.weight_N.abs().max()) for s in solved if s.weight_N.numel()), default=0.0)
    reading.num_nonfinite = sum(int((~a.finite_N).sum()) for a, _ in pairs)
    for rows, s, (a, _) in zip(reading.rows, solved, pairs, strict=True):
        counted = s.weight_N.abs() > 1e-9 * largest
        rows.weight = s.weight_N * counted
        rows.label = torch.where(counted, a.label_N, -1)
        rows.top, rows.ambiguous = s.top_N, a.tie_N & counted
        rows.even = torch.zeros_like(counted)
    change = sum(s.change for s in solved)
    reading.residual = math.sqrt(sum(s.misfit for s in solved) / change) if change else 0.0
    live = torch.stack([a.live_V | b.live_V for a, b in pairs if a.live_V.numel() == width]).any(0)
    if bool(live.any()) and not bool(live.all()):
        reading.masked_V = ~live
    return scale
