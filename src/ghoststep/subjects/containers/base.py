"""What every container gives: tensors by name, and the rows of one of them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ghoststep.errors import CannotLook
from ghoststep.evidence.checkpoint import TensorInfo
from ghoststep.subjects.base import RowStore, Source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SUPPORTED_FORMATS = (
    "safetensors (single, sharded with model.safetensors.index.json, PEFT adapter), pytorch_model.bin (single, "
    "sharded; also .pt, "
    ".pth, .ckpt of PyTorch), GGUF, and torch distributed checkpoints (.metadata with *.distcp)"
)

MAX_DIMENSION = 2**48
"""No stored dimension or element count is larger: above every file system's file size, below what overflows anywhere."""


class Container(Protocol):
    """The tensors of one checkpoint, whatever the number of files."""

    format: str

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor by its real name."""
        ...

    @property
    def metadata(self) -> Mapping[str, object]:
        """Free key-values of the container ({} where it has none)."""
        ...

    def rows(self, name: str) -> RowStore:
        """Raw rows of a stored matrix; `CannotLook` for other names or shapes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the header of a file (or those of all files of one checkpoint) says: tensors, the first byte of each in its file, and
    free key-values."""

    tensors: Mapping[str, TensorInfo]
    starts: Mapping[str, int]
    metadata: Mapping[str, object]


def join_headers(headers: Iterable[Header], where: str) -> Header:
    """The headers of several files as one; the first file counts where key-values differ. `CannotLook` when two hold one tensor."""
    tensors: dict[str, TensorInfo] = {}
    starts: dict[str, int] = {}
    metadata: dict[str, object] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in tensors:
                raise CannotLook(
                    f"{where}: tensor {name!r} stands in both {tensors[name].file} and {info.file}, and no index says which one "
                    "counts. Check one file: name it instead of the folder."
                )
            tensors[name] = info
        starts.update(header.starts)
        metadata = {**header.metadata, **metadata}
    return Header(tensors=tensors, starts=starts, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the elements of one tensor stand in its file: first byte, and strides in elements (None: row after row)."""

    start: int
    strides: tuple[int, ...] | None = None


def find(tensors: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    """The tensor of this name; `CannotLook` names near ones."""
    if name in tensors:
        return tensors[name]
    near = difflib.get_close_matches(name, list(tensors)[:20_000], n=3)
    hint = f"; near names: {', '.join(near)}" if near else ""
    raise CannotLook(f"no tensor {name!r} among the {len(tensors)} stored ones{hint}.")


def require_matrix(info: TensorInfo) -> tuple[int, int]:
    """(table rows, dimensions) of a matrix; `CannotLook` for any other shape."""
    if len(info.shape) != 2:
        raise CannotLook(f"{info.name} in {info.file} has shape {list(info.shape)}: expected a table [table rows, dimensions].")
    return info.shape[0], info.shape[1]


def check_range(start: int, stop: int, num_rows: int) -> None:
    """`IndexError` unless 0 ≤ start ≤ stop ≤ num_rows (a mistake of the caller, not of the file)."""
    if not 0 <= start <= stop <= num_rows:
        raise IndexError(f"table rows {start} to {stop} asked of a table of {num_rows}")


@dataclass(slots=True, kw_only=True, eq=False)
class BlockRows:
    """Rows that stand one after the other in a file. A block of rows is one read: for a local file a view, no copy."""

    info: TensorInfo
    num_rows: int
    num_dims: int
    row_bytes: int
    source: Source
    start: int

    def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows [start, stop) as stored: uint8 [stop - start, row_bytes], read-only."""
        import numpy as np

        check_range(start, stop, self.num_rows)
        first = self.start + start * self.row_bytes
        block = self.source.read(self.info.file, first, first + (stop - start) * self.row_bytes)
        return np.frombuffer(block, dtype=np.uint8).reshape(stop - start, self.row_bytes)


@dataclass(slots=True, kw_only=True, eq=False)
class StridedRows:
    """Rows of a tensor saved as a view (transposed, sliced, expanded). Each block is copied into row order.

    The bytes from the first to the last element are read once and kept: a view for a local file, real memory for a remote one.
    """

    info: TensorInfo
    num_rows: int
    num_dims: int
    row_bytes: int
    source: Source
    layout: Layout
    item_bytes: int
    _span: list[memoryview | bytes] = field(default_factory=list)

    def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows [start, stop): uint8 [stop - start, row_bytes], a copy unless the values of a row stand side by side."""
        import numpy as np

        check_range(start, stop, self.num_rows)
        if self.num_rows == 0 or self.num_dims == 0:
            return np.empty((stop - start, self.row_bytes), dtype=np.uint8)
        row_stride, dim_stride = (stride * self.item_bytes for stride in self.layout.strides or (self.num_dims, 1))
        if not self._span:
            last = (self.num_rows - 1) * row_stride + (self.num_dims - 1) * dim_stride + self.item_bytes
            self._span.append(self.source.read(self.info.file, self.layout.start, self.layout.start + last))
        flat = np.frombuffer(self._span[0], dtype=np.uint8)
        items = np.lib.stride_tricks.as_strided(
            flat[start * row_stride :],
            shape=(stop - start, self.num_dims, self.item_bytes),
            strides=(row_stride, dim_stride, 1),
            writeable=False,
        )
        return items.reshape(stop - start, self.row_bytes)


def rows_of(source: Source, info: TensorInfo, layout: Layout, item_bits: int) -> RowStore:
    """The row store of a plainly stored matrix (`item_bits` per element)."""
    num_rows, num_dims = require_matrix(info)
    if (num_dims * item_bits) % 8:
        raise CannotLook(f"{info.name} in {info.file}: a table row of {num_dims} {info.dtype} values ends inside a byte.")
    row_bytes = num_dims * item_bits // 8
    if layout.strides in (None, (num_dims, 1)):
        return BlockRows(
            info=info, num_rows=num_rows, num_dims=num_dims, row_bytes=row_bytes, source=source, start=layout.start
        )
    return StridedRows(
        info=info,
        num_rows=num_rows,
        num_dims=num_dims,
        row_bytes=row_bytes,
        source=source,
        layout=layout,
        item_bytes=item_bits // 8,
    )


def num_elements(shape: tuple[int, ...]) -> int:
    """Product of the sizes (1 for a scalar)."""
    return math.prod(shape)


def brief(value: object) -> str:
    """A short, one-level text of a value from a file, safe for any nesting and length."""
    if isinstance(value, (list, tuple)):
        kinds = (type(item).__name__ if isinstance(item, (list, tuple, dict)) else brief(item) for item in value[:6])
        return f"[{', '.join(kinds)}{', ...' if len(value) > 6 else ''}]"
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a number of {value.bit_length()} bits"
    return repr(value[:60]) if isinstance(value, str) else repr(value)[:60]
