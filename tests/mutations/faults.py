"""All planted faults."""

from __future__ import annotations

from tests.mutations import label_faults, mask_faults, step_faults, vocab_faults
from tests.mutations.fault import Fault

FAULTS: tuple[Fault, ...] = (*label_faults.FAULTS, *mask_faults.FAULTS, *vocab_faults.FAULTS, *step_faults.FAULTS)
BY_NAME = {f.name: f for f in FAULTS}
