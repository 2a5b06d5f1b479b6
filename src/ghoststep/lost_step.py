"""The lines from which a step counts as lost: one place for the clip that prevents it, the gate before it and the checks after it."""

from __future__ import annotations

LOST_COEFFICIENT = 1e-3
"""Clip coefficient below which a step counts as lost: everything else in it shrinks a thousandfold. The line between a hard but
ordinary clip (observed spikes of healthy runs: up to some tens of the bound) and the finite spike of a near-zero row
(1e3 to 1e18)."""

OWNED = 0.99
"""Share of the squared gradient norm from which one table row, or a few together, own the step."""

CRUSHED_TRUNK = 1e-2
"""The trunk's gradient after clipping, over its median in earlier steps, below which a step is crushed."""

UNSEEN_TRUNK = 1e-4
"""The trunk's share of the norm below which a step counts as crushed while fewer than `LEAST_HISTORY` steps are known. Stricter,
since a run that sums its loss has a small coefficient in every step."""

LEAST_HISTORY = 8
"""Earlier steps from which the run's own median of the trunk says what is usual."""
