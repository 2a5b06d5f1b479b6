"""Which dimension of a model's ids counts examples, and which the tokens of one: told from what the model does."""

from __future__ import annotations

from collections.abc import Mapping

from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.influence_order import order_change
from ghoststep.instruments.live.influence_probe import Probe
from ghoststep.instruments.live.influence_session import Session


def batch_stands_first(call: LiveCall, probe: Probe) -> bool:
    """The ids are [B, T] and not [T, B] beyond doubt: the model returns one vector for each row of them, or counts positions
    along their rows."""
    import torch

    rows, time = (int(n) for n in probe.ids_BT.shape)
    if rows == time:
        return False
    output = call.calls[0].output
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else (output,)
    heights = {int(v.shape[0]) for v in values if isinstance(v, torch.Tensor) and v.dim() == 2}
    if rows in heights or time in heights:
        return time not in heights
    return time in probe.position_sizes and rows not in probe.position_sizes


def no_order(turned: Session) -> bool:
    """Read time first, the order of tokens makes no difference: what attends to each other there are examples, not tokens."""
    if not turned.probe.attention.num_operations:
        return False
    found = order_change(turned)
    return found is not None and found[0] <= found[1] <= 1e-2


def has_pads_inside(session: Session) -> bool:
    """A real position behind padding that stands behind a real one: examples read that way are no texts."""
    import numpy as np

    real = session.at.real
    behind = np.logical_or.accumulate(session.at.padding & np.logical_or.accumulate(real, axis=1), axis=1)
    return bool((real & behind).any())
