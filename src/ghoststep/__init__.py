"""ghoststep finds, proves, explains, prevents and repairs silent failures of language-model training with PyTorch.

Importing it costs nothing: every name below is loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ghoststep.api import check
    from ghoststep.errors import CannotLook, ConfigError, DoesNotApply, GhoststepError, SubjectError, UsageError
    from ghoststep.finding import Basis, Finding, Outcome, Power, Quantity, Report, Severity, Symptom, Verdict, Where
    from ghoststep.subjects.setup import Setup

__version__ = "0.1.0"

_HOMES = {
    "check": "ghoststep.api",
    "Setup": "ghoststep.subjects.setup",
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
    "GhoststepError",
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
    "Where",
    "check",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ghoststep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
