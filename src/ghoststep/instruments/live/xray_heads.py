"""Which modules are output heads: usually one, several where more than one token is predicted ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.users_errors import users_code
from ghoststep.instruments.live.xray_run import frozen, loss_graph
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

_PRODUCTS = ("mm", "linear", "matmul")


def heads(setup: Setup, call: LiveCall) -> list[torch.nn.Module]:
    """Every module whose output becomes logits. Empty if none is called.

    Any other projection to as many classes is a candidate (a feed-forward layer can be as wide as the vocabulary is large):
    those whose weight stands in the product right before a log-softmax of the loss are heads. Cost: nothing, or one forward
    where there are candidates.
    """
    if call.head is None:
        return []
    main = main_head(call)
    inside = {id(m) for m in main.modules()}
    candidates = [m for m in call.core.modules() if id(m) not in inside and _fits(m, call)]
    if not candidates:
        return [main]
    with frozen(setup):
        for m in candidates:
            m.weight.requires_grad_(True)
        with users_code():  # it may call autograd on parameters, which are frozen here
            loss = loss_graph(setup, setup.batches[0])
        weights = _weights_before_log_softmax(loss, call.num_classes or 0) if loss.requires_grad else set()
    return [m for m in candidates if id(m.weight) in weights] + [main]


def main_head(call: LiveCall) -> torch.nn.Module:
    """An adapter around the head adds to its output: the whole of it is the head."""
    assert call.head is not None
    parent = call.head_name
    while parent := parent.rpartition(".")[0]:
        module = call.core.get_submodule(parent)
        if hasattr(module, "base_layer"):
            return module
    return call.head


def _fits(module: Any, call: LiveCall) -> bool:
    weight = module._parameters.get("weight")  # reading the attribute may run code (parametrised weights)
    return (
        weight is not None and weight.dim() == 2 and call.num_classes in weight.shape and weight.is_floating_point()
        and module is not call.embedding and not hasattr(module, "num_embeddings") and not any(True for _ in module.children())
        and weight is not getattr(call.embedding, "weight", None)
    )  # fmt: skip


def _weights_before_log_softmax(loss: torch.Tensor, num_classes: int) -> set[int]:
    """ids of the parameters in the nearest matrix product below each log-softmax."""
    from ghoststep.instruments.live.xray_nodes import log_softmax_nodes

    found: set[int] = set()
    for start in log_softmax_nodes(loss, 2, num_classes):
        queue, seen = [n for n, _ in start.next_functions], set()
        while queue:
            node = queue.pop(0)
            if node is None or node in seen:
                continue
            seen.add(node)
            below = [n for n, _ in node.next_functions]
            if any(p in type(node).__name__.lower() for p in _PRODUCTS):
                found |= _parameters(below)
            else:
                queue += below
    return found


def _parameters(nodes: list[Any], depth: int = 3) -> set[int]:
    found: set[int] = set()
    for node in nodes:
        if node is None:
            continue
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        elif depth:
            found |= _parameters([n for n, _ in node.next_functions], depth - 1)
    return found
