"""A model whose low-precision weights are float32 for a while, without touching a parameter object."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def in_float32(model: torch.nn.Module) -> Iterator[None]:
    """Replace bfloat16 and float16 parameters and buffers by float32 copies meanwhile; shared ones stay shared.

    The modules are given other parameters and get the same objects back, so hooks, accumulators and optimizers that hold the
    user's parameters see nothing. Costs one float32 copy of the low-precision weights.
    """
    import torch

    low = (torch.bfloat16, torch.float16)
    copies: dict[int, torch.nn.Parameter] = {}
    replaced: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    buffers: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
    try:
        for module in model.modules():
            for name, p in list(module._parameters.items()):
                if p is not None and p.dtype in low:
                    if id(p) not in copies:
                        copies[id(p)] = torch.nn.Parameter(p.detach().float(), requires_grad=False)
                    replaced.append((module, name, p))
                    setattr(module, name, copies[id(p)])  # recurrent modules keep a list of their own beside it
            for name, b in list(module._buffers.items()):
                if b is not None and b.dtype in low:
                    buffers.append((module, name, b))
                    module._buffers[name] = b.detach().float()
        yield
    finally:
        for module, name, p in replaced:
            setattr(module, name, p)
        for module, name, b in buffers:
            module._buffers[name] = b
