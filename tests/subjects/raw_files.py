"""Files built byte by byte, so that tests can also build wrong ones; and a source in memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ghoststep.errors import CannotLook


@dataclass
class MemorySource:
    """A `Source` of byte strings. It has no path: what reads it would read a remote place too."""

    contents: Mapping[str, bytes]
    name: str = "memory"
    is_remote: bool = False

    def files(self) -> tuple[str, ...]:
        return tuple(sorted(self.contents))

    def size(self, file: str) -> int:
        return len(self.contents[file])

    def read(self, file: str, start: int, stop: int) -> bytes:
        if not 0 <= start <= stop <= len(self.contents[file]):
            raise CannotLook(f"{file}: bytes {start} to {stop} of {len(self.contents[file])}")
        return self.contents[file][start:stop]

    def read_whole(self, file: str, *, limit_bytes: int) -> bytes:
        if self.size(file) > limit_bytes:
            raise CannotLook(f"{file} is larger than {limit_bytes}")
        return self.contents[file]


def safetensors_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file with this header (JSON value or raw bytes) and, if given, this lie about its length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(shape: list[object], begin: object, end: object, dtype: object = "F32") -> dict[str, object]:
    """One tensor of a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def gguf_string(text: str | bytes) -> bytes:
    """A string as GGUF writes it."""
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_bytes(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
) -> bytes:
    """A GGUF file of ready-made key-values and tensor descriptions, with lies about their numbers if given."""
    pairs, tensors = pairs or [], tensors or []
    counts = (len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs)
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return header + b"\0" * (-len(header) % 32) + data


def gguf_tensor(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    """A GGUF tensor description; sizes innermost first."""
    return gguf_string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
