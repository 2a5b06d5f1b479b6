"""Power: a model whose mixing is switched off by zeros shows no influence at all. Switch it on for the probe, and off again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ghoststep.undisturbed import undisturbed

if TYPE_CHECKING:
    import torch

SWITCHED_OFF = 1e-4
"""A parameter whose largest value lies below this switches its path off: zero initialisation, LayerScale at 1e-5 or 1e-6."""


def switched_off(model: torch.nn.Module, *, vectors: bool) -> list[torch.nn.Parameter]:
    """Parameters that are zero (or nearly) throughout: matrices, and with `vectors` also scales and gates (not biases).

    Costs one read of every parameter.
    """
    found = []
    for name, p in model.named_parameters():
        if p.is_meta or not p.is_floating_point() or not p.numel() or (p.dim() < 2 and (not vectors or "bias" in name)):
            continue
        if float(p.detach().abs().max()) <= SWITCHED_OFF:
            found.append(p)
    return found


@contextlib.contextmanager
def lifted(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Give these parameters random values of the usual size, and their own back on leaving, bit for bit."""
    import torch

    copies = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in parameters:
                fan = p.shape[-1] if p.dim() > 1 else 1
                noise = torch.randn(p.shape, generator=generator) * (0.5 / fan**0.5)
                p.copy_(noise.to(p))
        yield
    finally:
        with undisturbed(), torch.no_grad():
            for p, copy in zip(parameters, copies, strict=True):
                p.copy_(copy)
