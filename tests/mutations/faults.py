"""All planted faults."""

from __future__ import annotations

from tests.mutations import (
    encoder_faults,
    flow_faults,
    label_faults,
    mask_faults,
    schedule_faults,
    step_faults,
    supervision_faults,
    vocab_faults,
)
from tests.mutations.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *label_faults.FAULTS,
    *supervision_faults.FAULTS,
    *mask_faults.FAULTS,
    *flow_faults.FAULTS,
    *vocab_faults.FAULTS,
    *encoder_faults.FAULTS,
    *step_faults.FAULTS,
    *schedule_faults.FAULTS,
)
BY_NAME = {f.name: f for f in FAULTS}
