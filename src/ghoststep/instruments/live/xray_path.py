"""What lies between the fed logits and the log-softmax of the loss: a second softmax, or rows put together from several positions.

N rows, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.instruments.live.xray_feed import feeding
from ghoststep.instruments.live.xray_graph import class_dimension, node_rows, signed
from ghoststep.instruments.live.xray_nodes import NodeReading, log_softmax_nodes
from ghoststep.instruments.live.xray_run import frozen, loss_graph

if TYPE_CHECKING:
    import torch

    from ghoststep.instruments.live.xray_passes import Look, Reading

SHARP = 1e4
"""A logit that no softmax, scale or temperature in use leaves anything beside."""
_ENDS = ("LogSoftmaxBackward0", "LogBackward0")
NUM_ROWS, NUM_COLUMNS = 3, 4


_SAME_ORDER = ("CloneBackward0", "AliasBackward0", "ToCopyBackward0")
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


def rows_by_graph(nodes: Sequence[Any], leaves: Sequence[torch.Tensor]) -> list[list[tuple[torch.Tensor, torch.Tensor]]] | None:
    """As `rows_of_leaves`, from the graph alone, where it is proof enough; None where it is not.

    One log-softmax over the last dimension and one leaf, with nothing between them but copies, views that keep the last
    dimension, and slices of the others: the rows are the leaf's, in order. Cost: none; nothing is run and nothing is read.
    """
    import torch

    if len(nodes) != 1 or len(leaves) != 1:
        return None
    leaf, result = leaves[0], nodes[0]._saved_result
    width = leaf.shape[-1]
    if class_dimension(nodes[0]) % result.dim() != result.dim() - 1 or result.shape[-1] != width:
        return None
    slices, node = [], nodes[0].next_functions[0][0]
    while node is not None and getattr(node, "variable", None) is not leaf:
        kind = type(node).__name__
        if kind in _VIEWS or kind == "SliceBackward0":
            sizes = tuple(node._saved_self_sym_sizes)
            if sizes[-1] != width:
                return None
            if kind == "SliceBackward0":
                cut = slice(signed(node._saved_start), signed(node._saved_end), signed(node._saved_step))
                slices.append((sizes, signed(node._saved_dim) % len(sizes), cut))
        elif kind not in _SAME_ORDER:
            return None
        node = node.next_functions[0][0]
    if node is None:
        return None
    rows = torch.arange(leaf.numel() // width)
    for sizes, dim, cut in reversed(slices):  # the nearest to the leaf first
        if dim == len(sizes) - 1:
            return None
        rows = rows.reshape(sizes[:-1])[(slice(None),) * dim + (cut,)].flatten()
    return [[(rows, torch.arange(len(rows)))]] if len(rows) * width == result.numel() else None


def has_softmax_before(nodes: Sequence[Any]) -> bool:
    """True if a softmax as wide as a log-softmax stands between it and what was fed, without a logarithm behind it."""
    queue, seen = [(n, node._saved_result.shape) for node in nodes for n, _ in node.next_functions], set()
    while queue:
        node, shape = queue.pop()
        if node is None or node in seen or type(node).__name__ in _ENDS:
            continue
        seen.add(node)
        if type(node).__name__ == "SoftmaxBackward0" and node._saved_result.shape[class_dimension(node)] in shape:
            return True
        queue += [(n, shape) for n, _ in node.next_functions]
    return False


def log_odds_reached(look: Look, reading: Reading) -> float:
    """The largest difference of log-probabilities in any row when each label's logit is `SHARP` and all others are 0.

    Infinite or about `SHARP` for a plain cross-entropy, 1 after a softmax. Cost: one forward without activations.
    """
    import torch

    labels = reading.leaf_labels

    def fill(call_number: int, output: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(output.shape, device=output.device)
        width = output.shape[-1]
        if call_number >= len(labels) or labels[call_number].numel() * width != output.numel():
            return zeros
        label = labels[call_number].to(output.device).reshape((*output.shape[:-1], 1))
        return torch.scatter_add(zeros, -1, label.clamp_min(0), (label >= 0).float() * SHARP)

    with (
        frozen(look.setup),
        feeding(look.core, look.modules, look.embedding, look.grid, fill, keep_dtype=look.keep_dtype) as feeder,
    ):
        loss = loss_graph(look.setup, look.batch)
        if not feeder.fed:
            raise CannotLook("the loss did not call the head again")
        nodes = log_softmax_nodes(loss, look.fewest_classes, feeder.fed[0].leaf.shape[-1])
        apart = [node_rows(n._saved_result.detach(), n) for n in nodes]
        return max((float((a.amax(-1) - a.amin(-1)).max()) for a in apart if a.numel()), default=float("inf"))


def positions_of_a_row(loss: torch.Tensor, readings: Sequence[NodeReading], leaves: Sequence[torch.Tensor]) -> int:
    """From how many rows of the leaf the classes of one row of the log-softmax were taken, if they changed places; else 0.

    Proof: a gradient at one class of one row arrives at one entry of the leaf only, of another class, and entries of one row
    arrive at several. Averages, mixtures and permuted classes do not look like that. Cost: a few backward passes over [N, V].
    """
    if len(leaves) != 1 or len(readings) != 1 or readings[0].num_classes != leaves[0].shape[-1]:
        return 0
    reading, found = readings[0], []
    trained = [i for i, w in enumerate(reading.targets.weight_N.tolist()) if w][: 50 * NUM_ROWS]
    for row in trained[:: max(1, len(trained) // NUM_ROWS)][:NUM_ROWS]:
        step = max(1, reading.num_classes // NUM_COLUMNS)
        places = [_arrives_at(loss, reading, row, column, leaves[0]) for column in range(0, reading.num_classes, step)]
        if any(p is None for p in places):
            return 0
        moved = [p for p, column in zip(places, range(0, reading.num_classes, step), strict=True) if p and p[1] != column]
        positions = {p[0] for p in places if p}
        if 2 * len(moved) < len(places) or len(positions) < 2:
            return 0
        found.append(len(positions))
    return max(found, default=0)


def _arrives_at(loss: torch.Tensor, reading: NodeReading, row: int, column: int, leaf: torch.Tensor) -> tuple[int, int] | None:
    """(row, class) of the only entry of the leaf that feeds this entry of the log-softmax; None if there are more, or none."""
    import torch

    node = reading.node

    def hook(grad_inputs: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
        dim = class_dimension(node)
        rows = torch.zeros_like(grad_inputs[0]).movedim(dim, -1)
        lead = rows.shape[:-1]
        flat = rows.reshape(-1, rows.shape[-1]).contiguous()
        flat[row, column] = 1.0
        return (flat.reshape((*lead, flat.shape[-1])).movedim(-1, dim).contiguous(),)

    handle = node.register_hook(hook)
    try:
        (grad,) = torch.autograd.grad(loss, [leaf], grad_outputs=torch.zeros_like(loss), retain_graph=True, allow_unused=True)
    finally:
        handle.remove()
    entries = [] if grad is None else grad.reshape(-1, grad.shape[-1]).nonzero().tolist()
    return (entries[0][0], entries[0][1]) if len(entries) == 1 else None
