"""Every gradient is exactly zero: is it the loss (equal rewards), or can no loss move anything (a saddle of zeros)?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.training import Gradient, LiveWiring
from ghoststep.evidence.zero_gradients import ZeroGradients
from ghoststep.instruments.live.calling import LiveCall, eager, unwrap
from ghoststep.instruments.live.embedding_seam import floats
from ghoststep.instruments.live.untouched import untouched
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch


@instrument
def zero_gradients(setup: Setup, wiring: LiveWiring, call: LiveCall) -> ZeroGradients:
    """Backward of a random combination of the model's outputs, where the user's loss gave every parameter a gradient of exactly 0.

    `DoesNotApply` where any gradient is not zero. Cost then: none; else one forward and backward. Nothing is changed.
    """
    import torch

    if wiring.gradient_reason:
        raise CannotLook(wiring.gradient_reason)
    asked = [p for p in wiring.parameters if p.trainable]
    if not any(p.gradient is Gradient.ZERO for p in asked):
        raise DoesNotApply("no gradient is exactly zero")
    if any(p.gradient not in (Gradient.ZERO, Gradient.NONE) for p in asked):
        raise DoesNotApply("some gradients are not zero")
    core, _ = unwrap(setup.model)
    parameters = {n: p for n, p in core.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(20)
    with untouched(setup), eager(), torch.enable_grad():
        reached: set[str] = set()
        num_outputs = 0
        for one in call.calls:
            try:
                output = core(*one.args, **one.kwargs)
            except Exception as error:  # the user's own model, which ran before
                raise CannotLook(f"the model raised when it was run again: {type(error).__name__}: {error}") from error
            parts = [t for t in floats(output) if t.requires_grad and t.numel() > 1]
            if not parts:
                continue
            total = sum((_random(t, generator) * t.float()).sum() for t in parts)
            assert isinstance(total, torch.Tensor)
            grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
            reached |= {n for n, g in zip(parameters, grads, strict=True) if g is not None and bool((g != 0).any())}
            num_outputs += len(parts)
        if not num_outputs:
            raise CannotLook("no output of the model beside its loss requires a gradient")
        zeros = tuple(n for n, p in parameters.items() if not bool((p.detach() != 0).any()))
    return ZeroGradients(num_parameters=len(parameters), reached=tuple(sorted(reached)), zero_valued=zeros)


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randn(like.shape, generator=generator).to(like.device)
