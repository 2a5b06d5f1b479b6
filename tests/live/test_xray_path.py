"""Which row of the fed logits a row of the log-softmax is, read off the graph: held against where gradients really arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ghoststep.instruments.live.xray_path import rows_by_graph

B, T, V = 3, 5, 7
Way = Callable[[torch.Tensor], torch.Tensor]

PROVEN: dict[str, Way] = {
    "as it is": lambda z: z,
    "flattened": lambda z: z.reshape(-1, V),
    "without the last": lambda z: z[:, :-1].reshape(-1, V),
    "without the first": lambda z: z[:, 1:].contiguous().view(-1, V),
    "every second": lambda z: z[:, ::2],
    "of some examples": lambda z: z[1:3, :-1],
    "cut twice": lambda z: z[:, 1:][:, :-1].flatten(0, 1),
    "flattened, then cut": lambda z: z.view(-1, V)[2:-3],
    "another view": lambda z: z.view(T, B, V),
}
LEFT_OPEN: dict[str, Way] = {
    "time first": lambda z: z.transpose(0, 1),
    "scrambled": lambda z: z.transpose(1, 2).reshape(-1, V),
    "classes cut": lambda z: z[..., :-1],
    "scaled": lambda z: z / 2,
    "kept positions": lambda z: z[:, torch.tensor([0, 2])],
    "masked classes": lambda z: z.masked_fill(torch.arange(V) > 4, -torch.inf),
    "summed over positions": lambda z: z.cumsum(1),
}


def of(way: Way, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor, Any]:
    leaf = torch.zeros(V).expand(B, T, V).requires_grad_()
    given = way(leaf.clone())
    return leaf, given, given.log_softmax(dim).grad_fn


@pytest.mark.parametrize("name", PROVEN)
def test_rows_are_where_the_gradient_arrives(name: str) -> None:
    leaf, given, node = of(PROVEN[name])
    links = rows_by_graph([node], [leaf])
    assert links is not None
    ((leaf_rows, node_rows),) = links[0]
    number = torch.arange(1.0, given.numel() // V + 1).reshape(given.shape[:-1])
    (arrived,) = torch.autograd.grad(given, leaf, number[..., None].expand(given.shape).contiguous())
    at_leaf = torch.zeros(B * T)
    at_leaf[leaf_rows] = number.flatten()[node_rows]
    assert torch.equal(arrived.reshape(-1, V)[:, 0], at_leaf)


@pytest.mark.parametrize("name", LEFT_OPEN)
def test_what_the_graph_does_not_prove_is_left_open(name: str) -> None:
    leaf, _, node = of(LEFT_OPEN[name])
    assert rows_by_graph([node], [leaf]) is None


def test_a_softmax_over_another_dimension_is_left_open() -> None:
    leaf, _, node = of(lambda z: z.reshape(-1, V), dim=0)
    assert rows_by_graph([node], [leaf]) is None


def test_several_heads_are_left_open() -> None:
    leaf, _, node = of(PROVEN["as it is"])
    assert rows_by_graph([node, node], [leaf]) is None
    assert rows_by_graph([node], [leaf, leaf]) is None
