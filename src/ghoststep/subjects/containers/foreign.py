"""Weight files of other frameworks: recognised, so that the refusal can say what was found. Also what kind a lone file is."""

from __future__ import annotations

from collections.abc import Mapping

from ghoststep.errors import CannotLook
from ghoststep.subjects.base import Source
from ghoststep.subjects.containers.gguf_file import GGUF_MAGIC
from ghoststep.subjects.containers.torch_archive import LEGACY_MAGIC, ZIP_MAGIC

_BY_SUFFIX: Mapping[str, str] = {
    ".h5": "HDF5 (Keras)",
    ".hdf5": "HDF5 (Keras)",
    ".keras": "a Keras archive",
    ".npz": "a NumPy archive",
    ".npy": "a NumPy array",
    ".msgpack": "Flax msgpack",
    ".onnx": "ONNX",
    ".tflite": "TensorFlow Lite",
    ".pb": "a TensorFlow graph",
    ".mlmodel": "Core ML",
    ".ckpt.index": "a TensorFlow checkpoint",
    ".nemo": "a NeMo archive",
    ".pkl": "a bare pickle",
    ".pickle": "a bare pickle",
    ".ot": "a rust-bert weight file",
    ".ggml": "GGML, the predecessor of GGUF",
    ".tar": "a tar archive",
    ".zip": "a zip archive",
    ".whl": "a Python wheel",
    ".gz": "a compressed file",
}
_BY_MAGIC: Mapping[bytes, str] = {
    b"\x89HDF": "HDF5 (Keras)",
    b"\x93NUMPY": "a NumPy array",
    b"\x1f\x8b": "a gzip file",
    b"(\xb5/\xfd": "a zstd file",
    b"lmgg": "GGML, the predecessor of GGUF",
    b"fmgg": "GGML, the predecessor of GGUF",
    b"tjgg": "GGML, the predecessor of GGUF",
}
_TFLITE_MAGIC = b"TFL3"
_TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def suffix_kind(file: str) -> str | None:
    """The foreign format that a name announces, or None."""
    lower = file.lower()
    return next((kind for suffix, kind in _BY_SUFFIX.items() if lower.endswith(suffix)), None)


def foreign_kind(source: Source, file: str) -> str | None:
    """The foreign format of a file by its first bytes, then by its name; None if it is none that is known."""
    size = source.size(file)
    head = bytes(source.read(file, 0, min(size, 16)))
    for magic, kind in _BY_MAGIC.items():
        if head.startswith(magic):
            return kind
    if head[4:8] == _TFLITE_MAGIC:
        return "TensorFlow Lite"
    return suffix_kind(file)


def weight_kind(source: Source, file: str) -> str | None:
    """ "safetensors", "gguf" or "pytorch" for a lone file, by name or first bytes; None for anything else."""
    lower = file.lower()
    try:
        size = source.size(file)
        head = bytes(source.read(file, 0, min(size, 16)))
    except CannotLook:
        return None
    if any(head.startswith(magic) for magic in _BY_MAGIC):
        return None  # whatever its name says
    if head.startswith(GGUF_MAGIC) or lower.endswith(".gguf"):
        return "gguf"
    if lower.endswith(".safetensors") or (size > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8):
        return "safetensors"
    if head.startswith(LEGACY_MAGIC) or lower.endswith(_TORCH_SUFFIXES):
        return "pytorch"
    if head.startswith(ZIP_MAGIC) and suffix_kind(file) is None:
        return "pytorch"
    return None
