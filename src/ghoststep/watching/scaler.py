"""What a loss scaler knows, without a read by the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def scale_of(scaler: Any) -> torch.Tensor | None:
    """Its scale now: a copy on its device, or None before the first use."""
    scale = getattr(scaler, "_scale", None)
    return None if scale is None else scale.detach().clone()


def found_inf(scaler: Any, optimizer: Any) -> torch.Tensor | None:
    """What a fused optimizer was told: above 0 if it left the weights alone."""
    states = getattr(scaler, "_per_optimizer_states", {})
    found = states[id(optimizer)].get("found_inf_per_device", {}) if id(optimizer) in states else {}
    return sum(found.values()) if found else None
