"""Facts about parameters whose gradients are all exactly zero."""

from __future__ import annotations

from dataclasses import dataclass

from ghoststep.evidence.base import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroGradients(Evidence):
    """The user's loss gave every trainable parameter a gradient of exactly zero; and what a random combination of the outputs gives.

    num_parameters: trainable ones. reached: those whose gradient is not zero there (empty: no loss on these outputs can move any).
    zero_valued: trainable ones whose elements are all 0.
    """

    num_parameters: int
    reached: tuple[str, ...]
    zero_valued: tuple[str, ...]
