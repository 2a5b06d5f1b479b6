"""Facts about what weight decay does to table rows that no batch feeds."""

from __future__ import annotations

from dataclasses import dataclass

from ghoststep.evidence.base import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class DecayFacts(Evidence):
    """The untied, trained input table under its optimizer and schedule.

    group: of the optimizer. declared_decay: its `weight_decay`. rate: measured on a tensor of the same dtype without gradient: each
    step multiplies a row by 1 - rate · lr (0 if nothing shrinks). dtype: of what the optimizer updates (master weights if any).
    horizon: steps of the run, None where nothing says so. schedule: in words. steps, exponents: after `steps[i]` steps a row has
    exp(-exponents[i]) of its norm; sampled up to the horizon, or for a constant rate up to 1e7 steps.
    """

    parameter: str
    group: int
    declared_decay: float
    rate: float
    peak_lr: float
    dtype: str
    horizon: int | None
    schedule: str
    steps: tuple[int, ...]
    exponents: tuple[float, ...]
