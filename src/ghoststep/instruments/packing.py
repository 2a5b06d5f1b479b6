"""Whether a stored table's values can be read exactly, or are packed by a quantisation that only its own code can undo."""

from __future__ import annotations

from collections.abc import Sequence

from ghoststep.evidence.checkpoint import StoredTensors, TensorInfo, fits_vocabulary
from ghoststep.instruments.tensor_names import Name

FLOATS = frozenset({"f64", "f32", "f16", "bf16", "f8_e4m3", "f8_e5m2"})
"""Stored dtypes that hold one value per element."""
_WORD_BITS = {
    "u8": 8, "i8": 8, "f8_e4m3": 8, "f8_e5m2": 8, "i16": 16, "u16": 16, "f16": 16, "bf16": 16, "i32": 32, "u32": 32, "f32": 32,
    "i64": 64, "u64": 64,
}  # fmt: skip
PACKED_BITS = (2, 3, 4, 5, 6, 8)
"""Bits a value that integer packings use."""
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


def unpacked_shape(
    tensor: TensorInfo, name: Name, stored: StoredTensors, *, hiddens: Sequence[int], vocab: int | None
) -> tuple[int, int] | None:
    """[table rows, dims] of a quantised table, from its stored shape and those of the tensors beside it; None where unclear.

    `hiddens` are the sizes that its dims may have, the hidden size first. Three layouts are understood. Flat: all values in
    one column (nf4, fp4: two a byte), so that values / dims = table rows. Along the dims: [R, D x bits / word] (int8, mxfp4,
    compressed-tensors, MLX) or turned, [D x bits / word, R] (GPTQ). Along the rows: [D, R x bits / word] with scales [groups,
    R] (AWQ). `vocab` only chooses between several sizes of dims that would all divide the values.
    """
    rows, columns = tensor.shape
    word = _WORD_BITS.get(tensor.dtype)
    if word is None:
        return None
    if _is_flat_4_bit(tensor, stored):
        return _flat_shape(rows * columns * word // 4, hiddens, vocab)
    if tensor.dtype in FLOATS:
        return (rows, columns) if columns > 1 else None
    scaled = _scale_columns(tensor, stored)
    if rows in hiddens and scaled is not None and any(columns * word == scaled * bits for bits in PACKED_BITS if bits < word):
        return scaled, rows
    found = set()
    for dims in hiddens:
        if any(columns * word == dims * bits for bits in PACKED_BITS):
            found.add((rows, dims))
        if name.leaf == "qweight" and any(rows * word == dims * bits for bits in PACKED_BITS if bits < word):
            found.add((columns, dims))
    if not found and tensor.dtype == "i8" and name.leaf == "weight" and columns > 1:
        return rows, columns  # one value a byte, in a table whose dims the config does not give
    return found.pop() if len(found) == 1 else None


def _is_flat_4_bit(tensor: TensorInfo, stored: StoredTensors) -> bool:
    """One column (or one line) of bytes with the absolute maxima of its blocks beside it, as bitsandbytes stores 4-bit weights."""
    return 1 in tensor.shape and any(f"{tensor.name}.{c}" in stored.tensors for c in ("absmax", "quant_map"))


def _flat_shape(num_values: int, hiddens: Sequence[int], vocab: int | None) -> tuple[int, int] | None:
    whole = [(num_values // dims, dims) for dims in hiddens if num_values % dims == 0]
    fitting = [shape for shape in whole if vocab is not None and fits_vocabulary(shape[0], vocab)]
    chosen = fitting or whole
    return chosen[0] if len(whole) == 1 or fitting else None


def _scale_columns(tensor: TensorInfo, stored: StoredTensors) -> int | None:
    """Of the scales beside a `qweight`: [groups, outputs]."""
    scales = stored.tensors.get(tensor.name.removesuffix(".qweight") + ".scales")
    return scales.shape[1] if scales is not None and len(scales.shape) == 2 else None


def _companions(tensor: TensorInfo, stored: StoredTensors) -> list[str]:
    stem = tensor.name
    for leaf in (".weight", ".qweight", ".weight_packed"):
        stem = stem.removesuffix(leaf)
    names = [f"{stem}.{companion}" for companion in _COMPANIONS]
    found = [n for n in names if n in stored.tensors and n != tensor.name]
    return found[:3]
