"""Parameters with NaN or infinity, and the mode the model is handed over in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook
from ghoststep.evidence.base import Missing
from ghoststep.evidence.model_state import ModelState, NonfiniteParameter
from ghoststep.instruments.live.calling import LiveCall, unwrap
from ghoststep.instruments.live.untouched import need_made
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 22


@instrument
def model_state(setup: Setup, call: LiveCall | Missing) -> ModelState:
    """Sum every parameter once (a sum is finite only if all of its terms are), and count only where the sum is not.

    Cost: one read of the parameters, about a tenth of a forward on one token a parameter; no copy beyond a block.
    """
    need_made(setup.model)
    core, _ = unwrap(setup.model)
    bad, unread, looked = [], [], 0
    for name, p in core.named_parameters():
        if p.is_meta or type(p.data).__name__ not in ("Tensor", "Parameter") or not p.is_floating_point():
            unread += [name] if p.is_floating_point() or p.is_meta else []
            continue
        looked += 1
        num_nan, num_infinite = _count(p.detach())
        if num_nan or num_infinite:
            bad.append(NonfiniteParameter(name=name, num_nan=num_nan, num_infinite=num_infinite, num_elements=p.numel(),
                                          trainable=p.requires_grad))  # fmt: skip
    if not looked and unread:
        raise CannotLook(f"no parameter can be read as numbers ({unread[0]}, ... on the meta device, sharded or quantised)")
    return ModelState(
        nonfinite=tuple(bad), num_parameters=looked, unread=tuple(unread), training=core.training,
        trains_in_loss=None if isinstance(call, Missing) else call.calls[-1].training,
        dropouts=tuple(n for n, m in core.named_modules() if not m.training and _drops(m)),
        has_optimizer=setup.optimizer is not None, has_train_step=setup.train_step is not None,
    )  # fmt: skip


def _count(values: torch.Tensor) -> tuple[int, int]:
    import torch

    num_nan = num_infinite = 0
    flat = values.reshape(-1)
    for start in range(0, flat.numel(), _BLOCK):
        block = flat[start : start + _BLOCK]
        block = block.float() if block.element_size() == 1 else block
        if not bool(torch.isfinite(block.sum(dtype=torch.float64 if block.dtype == torch.float64 else torch.float32))):
            block = block.float() if block.element_size() < 4 else block
            num_nan += int(block.isnan().sum())
            num_infinite += int(block.isinf().sum())
    return num_nan, num_infinite


def _drops(module: torch.nn.Module) -> bool:
    """A dropout layer, a recurrent layer between whose layers values are dropped, or attention that drops weights."""
    import torch

    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, (torch.nn.RNNBase, torch.nn.MultiheadAttention)):
        return module.dropout > 0
    return False
