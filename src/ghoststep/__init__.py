"""ghoststep finds, proves, explains, prevents and repairs silent failures of language-model training with PyTorch.

Importing it costs nothing: every name below is loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ghoststep.amplifying import amplify
    from ghoststep.api import check
    from ghoststep.errors import CannotLook, ConfigError, DoesNotApply, GhoststepError, SubjectError, UsageError
    from ghoststep.finding import Basis, Finding, Outcome, Power, Quantity, Report, Severity, Symptom, Verdict, Where
    from ghoststep.remedies.clip import clip_grad_norm_
    from ghoststep.remedies.gate_floor import GateFloor
    from ghoststep.remedies.loss import lm_loss
    from ghoststep.remedies.oracle_mask import OracleCollator, oracle_mask
    from ghoststep.subjects.setup import Setup
    from ghoststep.watching.policy import GhoststepWarning, LostStepError
    from ghoststep.watching.watch import Watch, watch

__version__ = "0.1.0"

_HOMES = {
    "amplify": "ghoststep.amplifying",
    "check": "ghoststep.api",
    "clip_grad_norm_": "ghoststep.remedies.clip",
    "lm_loss": "ghoststep.remedies.loss",
    "GateFloor": "ghoststep.remedies.gate_floor",
    "OracleCollator": "ghoststep.remedies.oracle_mask",
    "oracle_mask": "ghoststep.remedies.oracle_mask",
    "Setup": "ghoststep.subjects.setup",
    **dict.fromkeys(("GhoststepWarning", "LostStepError"), "ghoststep.watching.policy"),
    **dict.fromkeys(("Watch", "watch"), "ghoststep.watching.watch"),
    **dict.fromkeys(
        ("CannotLook", "ConfigError", "DoesNotApply", "GhoststepError", "SubjectError", "UsageError"), "ghoststep.errors"
    ),
    **dict.fromkeys(
        ("Basis", "Finding", "Outcome", "Power", "Quantity", "Report", "Severity", "Symptom", "Verdict", "Where"),
        "ghoststep.finding",
    ),
}

__all__ = [
    "Basis",
    "CannotLook",
    "ConfigError",
    "DoesNotApply",
    "Finding",
    "GateFloor",
    "GhoststepError",
    "GhoststepWarning",
    "LostStepError",
    "OracleCollator",
    "Outcome",
    "Power",
    "Quantity",
    "Report",
    "Setup",
    "Severity",
    "SubjectError",
    "Symptom",
    "UsageError",
    "Verdict",
    "Watch",
    "Where",
    "amplify",
    "check",
    "clip_grad_norm_",
    "lm_loss",
    "oracle_mask",
    "watch",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ghoststep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
