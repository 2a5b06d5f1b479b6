"""Whether a stored table's values can be read exactly, or are packed by a quantisation that only its own code can undo."""

from __future__ import annotations

from ghoststep.evidence.checkpoint import StoredTensors, TensorInfo
from ghoststep.instruments.tensor_names import Name

FLOATS = frozenset({"f64", "f32", "f16", "bf16", "f8_e4m3", "f8_e5m2"})
"""Stored dtypes that hold one value per element."""
_COMPANIONS = (
    "weight_scale", "weight_scale_inv", "weight_shape", "weight_zero_point", "scale_weight", "weight.absmax", "weight.quant_map",
    "weight.nested_absmax", "weight.quant_state", "weight.quant_state.bitsandbytes__nf4",
    "weight.quant_state.bitsandbytes__fp4", "absmax", "scales", "qzeros", "g_idx", "biases", "SCB", "CB", "zeros", "scb",
)  # fmt: skip


def unreadable_reason(tensor: TensorInfo, name: Name, stored: StoredTensors) -> str | None:
    """Why the values of this table cannot be read exactly, or None if they can.

    GGUF block types are readable (their format is public and exact). Elsewhere, integer storage, packed leaves (`qweight`)
    and scale tensors beside the weight mean a quantisation; which one is said, what its values are is never guessed.
    """
    if stored.format == "gguf":
        return None
    companions = _companions(tensor, stored)
    beside = f" with {', '.join(companions)} beside it" if companions else ""
    if name.leaf in ("qweight", "weight_packed"):
        return f"packed quantised table: {tensor.name} stored as {tensor.dtype}{beside}"
    if tensor.dtype not in FLOATS:
        return (
            f"quantised table: stored as {tensor.dtype} {list(tensor.shape)}{beside}; its values need the quantiser's own code"
        )
    if companions and tensor.dtype.startswith("f8"):
        return f"quantised table: stored as {tensor.dtype}{beside}; its values need these scales"
    if companions:
        return f"quantised table: stored as {tensor.dtype}{beside}"
    return None


def _companions(tensor: TensorInfo, stored: StoredTensors) -> list[str]:
    stem = tensor.name
    for leaf in (".weight", ".qweight", ".weight_packed"):
        stem = stem.removesuffix(leaf)
    names = [f"{stem}.{companion}" for companion in _COMPANIONS]
    found = [n for n in names if n in stored.tensors and n != tensor.name]
    return found[:3]
