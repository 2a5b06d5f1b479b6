"""Stored table rows as numbers: raw bytes of one block in, float values out, for every dtype a checkpoint may hold.

Shapes: R table rows of the block, D embedding dimensions. Two ways lead from bytes to values: `widen` is fast (float32
for narrow types, through torch) and `exact` slow (float64 from the bits, so that neither subnormals nor a
flush-to-zero mode are lost).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ghoststep.subjects.base import RowStore

MAX_DIMS = 1 << 22
"""A table row of more values than this is a lie in a header, not an embedding (the widest real ones are near 2^15)."""
BLOCK_ELEMENTS = 1 << 20
"""Values per block: 4 MB as float32, where the fast path is fastest (measured: 128 rows of 2048 cost 1.3 times as much)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """A binary float: value = mantissa × 2^(exponent - shift). `has_infinity` is False where only one pattern is NaN."""

    num_bits: int
    exponent_bits: int
    mantissa_bits: int
    torch_name: str
    has_infinity: bool = True

    @property
    def bias(self) -> int:
        """The exponent's offset."""
        return int((1 << (self.exponent_bits - 1)) - 1)

    @property
    def smallest(self) -> float:
        """The smallest positive value: the lowest subnormal."""
        return float(2.0 ** (1 - self.bias - self.mantissa_bits))

    @property
    def magnitude_mask(self) -> int:
        """All bits but the sign."""
        return int((1 << (self.num_bits - 1)) - 1)


FLOAT_FORMATS = (
    ("f64", FloatFormat(num_bits=64, exponent_bits=11, mantissa_bits=52, torch_name="float64")),
    ("f32", FloatFormat(num_bits=32, exponent_bits=8, mantissa_bits=23, torch_name="float32")),
    ("f16", FloatFormat(num_bits=16, exponent_bits=5, mantissa_bits=10, torch_name="float16")),
    ("bf16", FloatFormat(num_bits=16, exponent_bits=8, mantissa_bits=7, torch_name="bfloat16")),
    (
        "f8_e4m3",
        FloatFormat(num_bits=8, exponent_bits=4, mantissa_bits=3, torch_name="float8_e4m3fn", has_infinity=False),
    ),
    ("f8_e5m2", FloatFormat(num_bits=8, exponent_bits=5, mantissa_bits=2, torch_name="float8_e5m2")),
)
_F32 = FLOAT_FORMATS[1][1]


class RowDecoder:
    """Decodes the rows of one store. Raises `CannotLook` for a dtype that cannot be decoded exactly."""

    def __init__(self, store: RowStore) -> None:
        self.storage = store.info.dtype
        self.num_dims = store.num_dims
        if store.num_dims > MAX_DIMS:
            raise CannotLook(
                f"{store.info.name} in {store.info.file} claims {store.num_dims} values per table row, expected at most {MAX_DIMS}"
            )
        self.format = dict(FLOAT_FORMATS).get(self.storage)
        self._dequantize: Callable[[NDArray[np.uint8]], NDArray[np.float32]] | None = None
        self.smallest_nonzero: float
        self.storage_note: str | None
        if self.format is None:
            self._dequantize, self.smallest_nonzero, self.storage_note = _gguf_type(store)
        else:
            self.smallest_nonzero, self.storage_note = self.format.smallest, _float_note(self.storage, self.format)
        self._check_row_bytes(store)

    @property
    def is_double(self) -> bool:
        """True if `widen` gives float64."""
        return self.storage == "f64"

    @property
    def rows_per_block(self) -> int:
        """How many table rows make a block of about `BLOCK_ELEMENTS` values."""
        return max(1, min(BLOCK_ELEMENTS // max(1, self.num_dims), 1 << 14))

    def buffer(self) -> torch.Tensor | None:
        """A float32 [rows_per_block, D] buffer for `widen`, or None where it needs none."""
        if self.format is None or self.format.num_bits >= 32:
            return None
        import torch

        return torch.empty(self.rows_per_block, self.num_dims, dtype=torch.float32)

    def widen(self, raw_RB: NDArray[np.uint8], buffer: torch.Tensor | None) -> torch.Tensor:
        """The block as float32 (float64 for f64) [R, D]: a view of the bytes or of `buffer`; do not write to it."""
        import torch

        if self._dequantize is not None:
            return torch.from_numpy(self._dequantize(raw_RB))
        assert self.format is not None
        stored = torch.from_numpy(_writable_alias(self._words(raw_RB))).view(getattr(torch, self.format.torch_name))
        if self.format.num_bits >= 32:
            return stored
        wide = torch.empty(stored.shape, dtype=torch.float32) if buffer is None else buffer[: len(stored)]
        return wide.copy_(stored)

    def exact(self, raw_RB: NDArray[np.uint8]) -> NDArray[np.float64]:
        """The block as float64 [R, D], every stored value exact, NaN and inf included; about 30 ns per value."""
        if self._dequantize is not None:
            return _exact_values(self._dequantize(raw_RB).view("u4"), _F32)
        assert self.format is not None
        words = self._words(raw_RB)
        return words.view("f8") if self.is_double else _exact_values(words, self.format)

    def zero_rows(self, raw_RB: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """bool [R]: every stored value is +0 or -0, told from the bits (from the dequantised values for GGUF types)."""
        if self._dequantize is not None:
            words, form = self._dequantize(raw_RB).view("u4"), _F32
        else:
            assert self.format is not None
            words, form = self._words(raw_RB), self.format
        any_R: NDArray[np.bool_] = (words & words.dtype.type(form.magnitude_mask)).any(axis=1)
        return ~any_R

    def _words(self, raw_RB: NDArray[np.uint8]) -> NDArray[Any]:
        import numpy as np

        assert self.format is not None
        contiguous = np.ascontiguousarray(raw_RB)
        if contiguous.ctypes.data % (self.format.num_bits // 8):
            contiguous = contiguous.copy()  # a tensor may start at any byte of a file; torch needs aligned values
        return contiguous.view(f"<u{self.format.num_bits // 8}")

    def _check_row_bytes(self, store: RowStore) -> None:
        if self.format is not None and store.row_bytes != store.num_dims * self.format.num_bits // 8:
            raise CannotLook(
                f"{store.info.name} in {store.info.file}: {store.row_bytes} bytes per table row, expected "
                f"{store.num_dims * self.format.num_bits // 8} for {store.num_dims} values of {self.storage}"
            )


def _exact_values(words_RD: NDArray[Any], form: FloatFormat) -> NDArray[np.float64]:
    """Bits of a float of at most 32 bits to float64, by integer arithmetic: every subnormal becomes a normal float64."""
    import numpy as np

    bits = words_RD.astype(np.int64)
    magnitude = bits & form.magnitude_mask
    exponent = magnitude >> form.mantissa_bits
    fraction = magnitude & ((1 << form.mantissa_bits) - 1)
    mantissa = fraction + ((exponent > 0).astype(np.int64) << form.mantissa_bits)
    values = np.ldexp(mantissa.astype(np.float64), (np.maximum(exponent, 1) - form.bias - form.mantissa_bits).astype(np.int32))
    if form.has_infinity:
        top = exponent == (1 << form.exponent_bits) - 1
        values[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    else:
        values[magnitude == form.magnitude_mask] = np.nan
    signed: NDArray[np.float64] = np.where(magnitude != bits, -values, values)
    return signed


class _Alias:
    """Presents an array's memory as writable, so that torch takes a read-only map without a warning. Nothing writes."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._owner = array  # keeps the memory alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _writable_alias(array: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    signed = array.view(f"<i{array.dtype.itemsize}")  # torch before 2.3 has no unsigned 16, 32 and 64 bit types
    return signed if signed.flags.writeable or signed.size == 0 else np.asarray(_Alias(signed))


def _float_note(storage: str, form: FloatFormat) -> str | None:
    if form.smallest < 1e-37:
        return None
    return f"{storage} holds nothing smaller than {form.smallest:.2e}: smaller values were stored as exactly 0"


def _gguf_type(
    store: RowStore,
) -> tuple[Callable[[NDArray[np.uint8]], NDArray[np.float32]], float, str | None]:
    """How to dequantise this GGUF type, the smallest value it can hold, and what it hides."""
    try:
        import gguf
    except ImportError:
        raise CannotLook(
            f"{store.info.name} is stored as {store.info.dtype}; reading it needs the package gguf: pip install gguf"
        ) from None
    import numpy as np

    name = store.info.dtype
    kind = getattr(gguf.GGMLQuantizationType, name.upper(), None)
    unreadable = CannotLook(f"{store.info.name} in {store.info.file} is stored as {name!r}, which cannot be decoded exactly")
    if kind is None:
        raise unreadable
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if store.num_dims % per_block or store.row_bytes != store.num_dims // per_block * block_bytes:
        raise CannotLook(
            f"{store.info.name} in {store.info.file}: {store.row_bytes} bytes per table row do not fit {store.num_dims} values "
            f"of {name} ({per_block} values in {block_bytes} bytes)"
        )

    def dequantize(raw_RB: NDArray[np.uint8]) -> NDArray[np.float32]:
        if not len(raw_RB):
            return np.empty((0, store.num_dims), dtype=np.float32)  # gguf cannot
        with np.errstate(all="ignore"):  # NaN and inf scales are found and reported, not warned about
            values = gguf.quants.dequantize(np.ascontiguousarray(raw_RB), kind)
        return np.ascontiguousarray(values, dtype=np.float32).reshape(len(raw_RB), store.num_dims)

    try:
        dequantize(np.zeros((1, store.row_bytes), dtype=np.uint8))
    except NotImplementedError:
        raise unreadable from None
    if name in ("mxfp4", "nvfp4", "q8_k"):  # their scales are not fp16
        return dequantize, _F32.smallest, f"{name} blocks share a scale: values far below their block's largest are stored as 0"
    smallest = 2.0**-24
    note = (
        f"{name} keeps fp16 block scales: whatever lies below {smallest:.2e}, or far below its block's largest, is stored as 0"
    )
    return dequantize, smallest, note
