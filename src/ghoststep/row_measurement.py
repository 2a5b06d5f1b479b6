"""What was measured about near-zero rows on a live model, put beside what their wiring lets expect."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ghoststep.evidence.amplification import OVERFLOW_GRADIENT, Amplification, Reading, SpikedStep
from ghoststep.evidence.base import Missing
from ghoststep.evidence.plan import TrainingKind
from ghoststep.finding import Severity
from ghoststep.severity import Exposure, TokenExposure

NOT_MEASURED = Missing(reason="not a live setup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """severity: of the row on this very model. text: one sentence with the figure, for the finding's message."""

    severity: Severity
    text: str


def measured_row(
    amplified: Amplification | Missing,
    spiked: SpikedStep | Missing,
    exposure: TokenExposure,
    norm: float,
    training: TrainingKind,
) -> Measured | None:
    """None where nothing measured speaks for this row at the places where its token may stand."""
    found = None
    if isinstance(amplified, Amplification):
        found = amplified.judged(exposure.table_row, norm, can_be_first=exposure.can_be_first)
    if found is None or isinstance(amplified, Missing):
        return None
    place, reading = found
    whose = "its gradient" if reading.table_row == exposure.table_row else f"the gradient of table row {reading.table_row}"
    of = f" (norm {reading.norm:.3g})" if reading.table_row != exposure.table_row else ""
    figure = f"Measured on this model: fed at the {place.name}, {whose}{of} is {reading.gradient:.3g}"
    if reading.gradient <= amplified.lost:
        first = "" if exposure.can_be_first else _elsewhere(amplified, reading.table_row)
        return Measured(severity=Severity.NOTE, text=f"{figure}, harmless here{first}.")
    if isinstance(spiked, SpikedStep) and spiked.survives:
        text = f"{figure}, and your own train_step keeps everything else in the step, so no step is lost; the row stays tiny or heals."
        return Measured(severity=Severity.NOTE, text=text)
    severity = Severity.ERROR
    if training is TrainingKind.RL and exposure.exposure is Exposure.TEXT:
        severity = severity.milder()
    return Measured(severity=severity, text=f"{figure}: {consequence_of(reading, amplified.bound)}{train_step_text(spiked)}.")


def _elsewhere(amplified: Amplification, table_row: int) -> str:
    worst = amplified.worst(table_row)
    if worst is None or worst[1].gradient <= amplified.lost:
        return ""
    return f"; at the {worst[0].name} it would be {worst[1].gradient:.3g}"


def consequence_of(reading: Reading, bound: float) -> str:
    """What clipping to `bound` makes of a step with this gradient, in half a sentence."""
    if not math.isfinite(reading.gradient):
        return "it is not finite, and clipping spreads NaN over the model"
    if reading.gradient > OVERFLOW_GRADIENT:
        return "the float32 norm of all gradients is inf, and torch's clipping sets every one of them to 0"
    return f"clipped to {bound:g}, everything else in the step shrinks by {bound / reading.gradient:.1g}"


def train_step_text(spiked: SpikedStep | Missing) -> str:
    """What the user's own train step left of everything else; "" where none was run."""
    if not isinstance(spiked, SpikedStep):
        return ""
    rows = "" if spiked.kept_rows is None else f" and {spiked.kept_rows:.2g} of the other table rows'"
    return f"; your own train_step left {spiked.kept_trunk:.2g} of the trunk's gradient{rows}"
