"""What the engine and the instruments ask of a subject.

Three small protocols keep containers apart from places: a `Source` gives bytes of named files (a folder, a Hub revision),
a container reader turns them into tensors, and a `RowStore` hands out the raw rows of one table in blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ghoststep.evidence.checkpoint import TensorInfo
from ghoststep.finding import SubjectInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@runtime_checkable
class Subject(Protocol):
    """Anything that can be looked at."""

    @property
    def kind(self) -> str:
        """ "checkpoint", "setup", ...: the same for every subject of a class."""
        ...

    @property
    def name(self) -> str:
        """As the user gave it."""
        ...

    def info(self) -> SubjectInfo:
        """Kind, name and facts worth printing; cheap."""
        ...


class Source(Protocol):
    """Named files of one checkpoint. Names are relative, use "/" and never leave the root.

    `is_remote` is True where every read is a request over a network: tables are then fetched once and kept.
    """

    name: str
    is_remote: bool

    def files(self) -> tuple[str, ...]:
        """All file names, sorted."""
        ...

    def size(self, file: str) -> int:
        """Size in bytes."""
        ...

    def read(self, file: str, start: int, stop: int) -> memoryview | bytes:
        """Exactly bytes [start, stop); `CannotLook` when the file is shorter or the place refuses."""
        ...

    def read_whole(self, file: str, *, limit_bytes: int) -> bytes:
        """The whole file; `CannotLook` when it is larger than `limit_bytes`."""
        ...


class RowStore(Protocol):
    """The raw rows of one table.

    `info.dtype` says how to decode a row: "f64" "f32" "f16" "bf16" "f8_e4m3" "f8_e5m2" hold `num_dims` little-endian values;
    any other name is a GGUF type in lower case ("q8_0", "q4_1", ...) to be decoded by `gguf.quants.dequantize`.
    """

    info: TensorInfo
    num_rows: int
    num_dims: int
    row_bytes: int

    def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows [start, stop) as they are stored: uint8 [stop - start, row_bytes], read-only, maybe a view of a map.

        Called from several threads at once.
        """
        ...
