"""The whole influence matrix of one example, for looking at. No check asks for it: it costs a pass for each position."""

from __future__ import annotations

from ghoststep.errors import CannotLook
from ghoststep.evidence.influence import Influence
from ghoststep.evidence.picture import InfluenceMap
from ghoststep.instruments.live.base_probe import BaseProbe
from ghoststep.registry import instrument

MAX_TARGETS = 64


@instrument
def influence_map(base: BaseProbe, influence: Influence) -> InfluenceMap:
    """Complete `Influence.matrix_ST` by the gradient of each position's hidden state at the embedding of every other.

    Values are relative to the median over the own past, as in `Influence`. A gradient does not see discrete routing: where the
    swaps of `Influence` saw more, they stand. Examples longer than `MAX_TARGETS` positions, and models whose mixing is switched
    off by zeros, stay as they are. Cost: one forward and one backward for each position. Nothing is changed.
    """
    import numpy as np

    seen_ST = influence.matrix_ST
    probe = base.probe.turned() if influence.is_time_first else base.probe
    num_positions = seen_ST.shape[1]
    if influence.probes_perturbed or num_positions > MAX_TARGETS or seen_ST.shape[0] != num_positions:
        return InfluenceMap(matrix_ST=seen_ST, example=influence.matrix_example, num_backward=0)
    gradient_ST = np.full(seen_ST.shape, np.nan)
    try:
        for t in range(num_positions):
            norm_BT = probe.gradient([(influence.matrix_example, t)]).double().numpy()
            gradient_ST[:, t] = norm_BT[influence.matrix_example, :num_positions]
    except (RuntimeError, CannotLook, NotImplementedError):  # no graph to go back through: what was seen stands
        return InfluenceMap(matrix_ST=seen_ST, example=influence.matrix_example, num_backward=0)
    gradient_ST[~np.isfinite(gradient_ST)] = np.nan
    past = gradient_ST[np.triu_indices(num_positions, k=1)]
    reference = float(np.median(past[past > 0])) if (past > 0).any() else float(np.nanmax(gradient_ST, initial=0.0)) or 1.0
    whole_ST = np.fmax(gradient_ST / reference, seen_ST)
    return InfluenceMap(matrix_ST=whole_ST, example=influence.matrix_example, num_backward=num_positions)
