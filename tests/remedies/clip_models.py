"""Models with gradients made to order, and a slow, exact twin of the norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ghoststep.remedies.clip import _clip, _Step

Grads = list["torch.Tensor | None"]


def small(rows: int = 50, width: int = 16, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A table, a linear layer, a norm and an untied head."""
    torch.manual_seed(0)
    layers = (nn.Embedding(rows, width), nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, rows))
    return nn.Sequential(*layers).to(dtype)


def fill(model: nn.Module, scale: float = 1.0, seed: int = 1) -> None:
    """Random normal gradients of the given size in every parameter."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def grad_of(model: nn.Module, name: str) -> torch.Tensor:
    """A parameter's gradient, which is there."""
    grad = model.get_parameter(name).grad
    assert grad is not None
    return grad


def table_of(model: nn.Module) -> torch.Tensor:
    """The gradient of the first module's weight."""
    return grad_of(model, "0.weight")


def grads(parameters: Iterable[torch.Tensor]) -> Grads:
    """Copies of all gradients."""
    return [None if p.grad is None else p.grad.clone() for p in parameters]


def put(parameters: Iterable[torch.Tensor], values: Grads) -> None:
    """Copies back."""
    for p, g in zip(parameters, values, strict=True):
        p.grad = None if g is None else g.clone()


def on_device(given: nn.Module | Sequence[torch.Tensor], max_norm: float, mode: str = "row") -> torch.Tensor:
    """The route of accelerators, which reads nothing on the host, on CPU tensors."""
    with torch.no_grad():
        return _clip(_Step.of(given), max_norm, mode, error_if_nonfinite=False, foreach=None, host_reads=False)


def exact_norm(values: Iterable[torch.Tensor | None]) -> float:
    """sqrt of the exactly rounded sum of squares; finite up to float64's largest number."""
    flat = [abs(x) for g in values if g is not None for x in g.detach().double().flatten().tolist()]
    top = max(flat, default=0.0)
    return top * math.sqrt(math.fsum((x / top) ** 2 for x in flat)) if top > 0 else 0.0


def assert_equal_bits(a: Grads, b: Grads) -> None:
    """Every gradient the same, dtype and NaN included."""
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:
            assert x is y
            continue
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
