"""The log-softmax nodes of a loss graph: what arrives there is -weight * target, whatever the logits, caps and scales before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.instruments.live.xray_graph import class_dimension, node_rows
from ghoststep.instruments.live.xray_rows import MASKED_BELOW, Targets, chunks, signature, sketch, sketch_of, targets

if TYPE_CHECKING:
    import torch

MAX_NODES_APART = 6
_EXACT_INTEGERS = 128  # what every float dtype down to bfloat16 holds exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """One log-softmax: its rows [N] in the order of its own layout, a sketch [N, K] of what arrives, the signature of what leaves."""

    node: Any
    num_rows: int
    num_classes: int
    targets: Targets
    sketch_NK: torch.Tensor
    passed_on_NK: torch.Tensor | None
    masked_V: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafReading:
    """What arrived at one leaf: its columns with any gradient, bool [width], and the signature [N, 2] of its rows."""

    live_V: torch.Tensor
    signature_NK: torch.Tensor


def log_softmax_nodes(loss: torch.Tensor, fewest: int, most: int | None) -> list[Any]:
    """Nodes over at least `fewest` classes, nearest to the loss first. With `most` known, over half of them up to all."""
    seen: set[Any] = set()
    found: list[Any] = []
    queue: list[Any] = [loss.grad_fn]
    while queue:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "LogSoftmaxBackward0":
            result = node._saved_result
            width = result.shape[class_dimension(node)]
            if width >= fewest and (most is None or 0.5 * most <= width <= most):
                found.append(node)
        queue += [n for n, _ in node.next_functions]
    return found


_LINEAR = frozenset(
    ("NllLoss", "NllLoss2D", "Sum", "Mean", "Neg", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose",
     "Permute", "Slice", "Select", "Index", "Gather", "MaskedSelect", "Clone", "ToCopy", "Alias", "Expand", "Add", "Stack", "Cat",
     "Mul", "Div")
)  # fmt: skip


def is_linear_in(loss: torch.Tensor, nodes: Sequence[Any]) -> bool:
    """True if the graph itself proves that the loss is linear in these log-softmaxes and depends on nothing else that was fed.

    Then -weight * target is the same for all logits, and a second pass can only repeat the first. Products and quotients count
    where the other factor is one number; a tensor of factors may have been made from the logits (focal and similar losses).
    """
    wanted, seen, queue = set(nodes), set(), [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in wanted or node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
        below = [n for n, _ in node.next_functions if n is not None]
        if kind not in _LINEAR or (kind in ("Mul", "Div") and not _scales_by_one_number(node, below)):
            return False
        queue += below
    return True


def _scales_by_one_number(node: Any, below: Sequence[Any]) -> bool:
    try:
        other = getattr(node, "_saved_other", None)
    except RuntimeError:  # written into since: torch no longer gives it
        return False
    return len(below) == 1 and node.next_functions[0][0] is not None and getattr(other, "numel", lambda: 1)() == 1


def read_nodes(
    loss: torch.Tensor, nodes: Sequence[Any], leaves: Sequence[torch.Tensor], *, with_order: bool
) -> tuple[list[NodeReading], list[LeafReading]]:
    """One backward from the loss to the leaves, reading what arrives at each node on the way. Keeps nothing [N, V].

    `with_order` also looks at what arrives at the leaves, for `rows_by_order`, and keeps the graph for `rows_of_leaves`.
    """
    import torch

    found: dict[int, NodeReading] = {}

    def reader(place: int, node: Any) -> Any:
        def hook(grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> None:
            pull_NV, logp_NV = node_rows(grad_outputs[0], node), node_rows(node._saved_result, node)
            read = targets(pull_NV, logp_NV)
            masked = None
            if bool((read.num_masked_N > 0).any()):
                masked = (logp_NV[int(read.num_masked_N.argmax())] <= MASKED_BELOW).cpu()
            found[place] = NodeReading(
                node=node, num_rows=pull_NV.shape[0], num_classes=pull_NV.shape[1], targets=read, masked_V=masked,
                sketch_NK=sketch_of(read, pull_NV),
                passed_on_NK=signature(node_rows(grad_inputs[0], node)) if with_order else None,
            )  # fmt: skip

        return hook

    if len(nodes) == 1 and not with_order:
        # What arrives at the node is all that is asked: its own backward, three passes over [N, V], is spared.
        pull = torch.autograd.grad(loss, [torch.autograd.graph.GradientEdge(nodes[0], 0)])
        reader(0, nodes[0])((), pull)
        return [found[0]], []
    handles = [node.register_hook(reader(i, node)) for i, node in enumerate(nodes)]
    try:
        grads = torch.autograd.grad(loss, list(leaves), retain_graph=with_order, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    if not with_order:
        return [found[i] for i in sorted(found)], []
    arrived = [_arrived(g, leaf) for g, leaf in zip(grads, leaves, strict=True)]
    return [found[i] for i in sorted(found)], arrived


def _arrived(grad: torch.Tensor | None, leaf: torch.Tensor) -> LeafReading:
    import torch

    width = leaf.shape[-1]
    if grad is None:
        num = leaf.numel() // max(1, width)
        return LeafReading(live_V=torch.zeros(width, dtype=torch.bool), signature_NK=torch.zeros(num, 2).double())
    rows = grad.reshape(-1, width)
    live = torch.zeros(width, dtype=torch.bool, device=rows.device)
    for piece in chunks(rows):
        live |= piece.any(0)
        if bool(live.all()):
            break
    return LeafReading(live_V=live.cpu(), signature_NK=signature(rows))


def rows_by_order(
    readings: Sequence[NodeReading], leaves: Sequence[torch.Tensor], arrived: Sequence[LeafReading]
) -> list[list[tuple[torch.Tensor, torch.Tensor]]] | None:
    """As `rows_of_leaves`, for the usual layouts, without a further backward; None if they do not hold.

    One log-softmax a leaf, over all of its rows or all but the last position of each example, in order. Proven: each row of the
    leaf received what its row of the node passed on, up to one factor (a logit scale) that is the same for all.
    """
    import torch

    if len(readings) != len(leaves):
        return None
    result: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for k, (reading, leaf, seen) in enumerate(zip(readings, leaves, arrived, strict=True)):
        rows = torch.arange(leaf.numel() // leaf.shape[-1])
        if leaf.shape[-1] != reading.num_classes:
            return None
        if leaf.dim() == 3 and reading.num_rows == leaf.shape[0] * (leaf.shape[1] - 1):
            rows = rows.reshape(leaf.shape[:2])[:, :-1].flatten()
        if rows.numel() != reading.num_rows:
            return None
        if reading.passed_on_NK is None:
            return None
        left, got = reading.passed_on_NK, seen.signature_NK[rows]
        length = float((left * left).sum())
        factor = float((left * got).sum()) / length if length else 0.0
        apart = (got - factor * left).norm(dim=-1)
        elsewhere = float(seen.signature_NK.square().sum() - got.square().sum())
        if factor == 0 or elsewhere > 1e-9 * length or bool((apart > 1e-3 * abs(factor) * left.norm(dim=-1)).any()):
            return None
        nothing = torch.zeros(0, dtype=torch.int64)
        per_leaf = [(nothing, nothing)] * len(leaves)
        per_leaf[k] = (rows, torch.arange(reading.num_rows))
        result.append(per_leaf)
    return result


def rows_of_leaves(
    loss: torch.Tensor, readings: Sequence[NodeReading], leaves: Sequence[torch.Tensor]
) -> list[list[tuple[torch.Tensor, torch.Tensor]]] | None:
    """For each reading and each leaf: (leaf rows, node rows) that belong together, or None if that cannot be said.

    The gradient of the loss is multiplied by 0 and a row number is put in its place at the node: what arrives at a leaf is
    that number times a slope that a second pass with ones shows. Proven for each row, never assumed from shapes.
    """
    groups: list[list[int]] = [[i] for i in range(len(readings))]
    if len(readings) > MAX_NODES_APART:
        groups = [list(range(len(readings)))]
    result: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in readings]
    for group in groups:
        offsets, total = {}, 0
        for i in group:
            offsets[i] = total
            total += readings[i].num_rows
        numbers = _row_numbers(loss, readings, group, offsets, total, leaves)
        if numbers is None:
            return None
        hits = 0
        for per_leaf in numbers:
            for i in group:
                mine = (per_leaf >= offsets[i]) & (per_leaf < offsets[i] + readings[i].num_rows)
                leaf_rows = mine.nonzero().flatten()
                node_rows = per_leaf[leaf_rows] - offsets[i]
                result[i].append((leaf_rows, node_rows))
                hits += len(set(node_rows[readings[i].targets.weight_N[node_rows] != 0].tolist()))
        if hits != sum(int((readings[i].targets.weight_N != 0).sum()) for i in group):
            return None
    return result


def _row_numbers(
    loss: torch.Tensor, readings: Sequence[NodeReading], group: list[int], offsets: dict[int, int], total: int,
    leaves: Sequence[torch.Tensor],
) -> list[torch.Tensor] | None:  # fmt: skip
    """For each leaf, the node row that each of its rows feeds: int64 [rows], -1 where it feeds none."""
    import torch

    ones = _tagged(loss, readings, group, {i: torch.ones(readings[i].num_rows) for i in group}, leaves)
    found = [torch.zeros(o.shape[0], dtype=torch.int64) for o in ones]
    fed = [o.abs().sum(-1) > 0 for o in ones]
    base = 1
    while base < max(total, 2):
        digits = {i: ((torch.arange(readings[i].num_rows) + offsets[i]) // base) % _EXACT_INTEGERS for i in group}
        tags = _tagged(loss, readings, group, {i: d.float() for i, d in digits.items()}, leaves)
        for k, (tag, one) in enumerate(zip(tags, ones, strict=True)):
            ratio = (tag * one).sum(-1) / (one * one).sum(-1).clamp_min(1e-300)
            digit = ratio.round()
            if bool(((ratio - digit).abs() > 0.02)[fed[k]].any()):
                return None
            found[k] += digit.nan_to_num(0.0).long() * base
        base *= _EXACT_INTEGERS
    return [f.masked_fill(~ok, -1) for f, ok in zip(found, fed, strict=True)]


def _tagged(
    loss: torch.Tensor, readings: Sequence[NodeReading], group: list[int], tags: dict[int, torch.Tensor],
    leaves: Sequence[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    """Backward from 0 * loss with `tags` put in at the nodes: for each leaf its rows summed in 8 parts, float64 [rows, 8]."""
    import torch

    handles = []
    for i, reading in enumerate(readings):
        tag = tags.get(i)
        handles.append(reading.node.register_hook(_replace(reading.node, tag if i in group else None)))
    try:
        zero = torch.zeros_like(loss)
        grads = torch.autograd.grad(loss, list(leaves), grad_outputs=zero, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return [_folded(g, leaf) for g, leaf in zip(grads, leaves, strict=True)]


def _replace(node: Any, tag: torch.Tensor | None) -> Any:
    import torch

    def hook(grad_inputs: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
        given = grad_inputs[0]
        if tag is None:
            return (torch.zeros_like(given),)
        moved = given.movedim(class_dimension(node), -1)
        put_in = tag.to(given).reshape((*moved.shape[:-1], 1)).expand(moved.shape)
        return (put_in.movedim(-1, class_dimension(node)).contiguous(),)

    return hook


def _folded(grad: torch.Tensor | None, leaf: torch.Tensor) -> torch.Tensor:
    """Each row's gradient in 8 signed sums: enough to read a slope, and nothing [N, V] stays."""
    import torch

    width = leaf.shape[-1]
    if grad is None:
        return torch.zeros(leaf.numel() // max(1, width), 8, dtype=torch.float64)
    signs = torch.randn(width, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(grad.device)
    return sketch(grad.reshape(-1, width), signs)
