"""Random and mutated headers: only deliberate errors come out, in time, with memory in proportion to the file."""

from __future__ import annotations

import io
import json
import struct
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save
from tests.subjects.raw_files import MemorySource, gguf_bytes, gguf_string, gguf_tensor, safetensors_bytes
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from ghoststep.errors import CannotLook
from ghoststep.subjects.checkpoint import Checkpoint

FUZZ = settings(max_examples=400, deadline=5000, suppress_health_check=[HealthCheck.too_slow])
BYTES_PER_BYTE = 40
"""A one-byte JSON value costs up to 28 bytes of Python object and 8 of list slot."""
FIXED_BYTES = 600_000
"""One read-ahead window, lazily imported modules and the error with its traceback."""


def look(file: str, data: bytes, **beside: bytes) -> bool:
    """True if the file is accepted; anything but CannotLook is a failure, and so is memory out of proportion."""
    checkpoint = Checkpoint(MemorySource({file: data, **beside}))
    tracemalloc.start()
    try:
        stored = checkpoint.stored()
        for name, tensor in stored.tensors.items():
            if len(tensor.shape) == 2 and tensor.num_bytes:
                store = checkpoint.rows(name)
                assert store.raw_rows(0, store.num_rows).nbytes == tensor.num_bytes
    except CannotLook:
        return False
    else:
        return True
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < FIXED_BYTES + BYTES_PER_BYTE * len(data)


ODD_SIZES: list[object] = [-1, 2**31, 2**48, 2**62, 2**63, 2**64, 1.5, None, True, "4", []]
sizes: st.SearchStrategy[object] = st.one_of(st.integers(0, 5), st.sampled_from(ODD_SIZES))
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "BOOL", "F99", None, 3]),
        "shape": st.lists(sizes, max_size=4),
        "data_offsets": st.lists(st.one_of(st.integers(0, 40), sizes), max_size=3),
    }
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), entries),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=12,
)
headers = st.dictionaries(st.one_of(st.text(max_size=6), st.just("__metadata__")), json_values, max_size=5)


@FUZZ
@given(st.binary(max_size=400))
def test_random_bytes(data: bytes) -> None:
    for file in ("model.safetensors", "model.gguf", "pytorch_model.bin"):
        assert not look(file, data)


@FUZZ
@given(headers, st.binary(max_size=48), st.one_of(st.none(), st.integers(0, 2**64 - 1)))
def test_safetensors_of_random_json(header: dict[str, object], data: bytes, length: int | None) -> None:
    content = safetensors_bytes(json.dumps(header).encode(), data, length=length)
    assert not look("model.safetensors", content) or _library_accepts(content)


def _library_accepts(content: bytes) -> bool:
    """Ours must never be more lenient than the reference implementation."""
    try:
        load(content)
    except SafetensorError:
        return False
    except (KeyError, RuntimeError, ValueError, TypeError):  # a dtype this torch cannot hold: the header itself passed
        return True
    return True


def mutated(original: bytes) -> st.SearchStrategy[bytes]:
    """A few bytes replaced, or a piece cut out or doubled."""

    def apply(edits: list[tuple[int, int]], cut: tuple[int, int], double: bool) -> bytes:
        data = bytearray(original)
        for position, value in edits:
            data[position] = value
        first, last = sorted(cut)
        piece = data[first:last] if double else b""
        return bytes(data[:first] + piece + piece + data[last:]) if first != last else bytes(data)

    positions = st.integers(0, len(original) - 1)
    near = st.integers(0, min(len(original) - 1, 200))
    edits = st.lists(st.tuples(st.one_of(near, positions), st.integers(0, 255)), max_size=4)
    cuts = st.one_of(st.just((0, 0)), st.tuples(positions, positions))
    return st.builds(apply, edits, cuts, st.booleans())


SAFETENSORS = save({"wte": torch.ones(5, 4), "b": torch.zeros(3, dtype=torch.bfloat16)}, metadata={"format": "pt"})
GGUF = gguf_bytes(
    [
        gguf_string("general.alignment") + struct.pack("<II", 4, 32),
        gguf_string("tokens") + struct.pack("<IIQ", 9, 8, 3) + gguf_string("a") * 3,
        gguf_string("scores") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
    ],
    [gguf_tensor("wte", [32, 2], kind=8), gguf_tensor("b", [4], offset=96)],
    bytes(112),
)


def _torch_file(*, legacy: bool) -> bytes:
    buffer = io.BytesIO()
    saved = {"wte": torch.ones(5, 4), "t": torch.ones(4, 5).t()}
    torch.save(saved, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


TORCH_ZIP, TORCH_LEGACY = _torch_file(legacy=False), _torch_file(legacy=True)


def test_the_originals_are_accepted() -> None:
    assert look(".metadata", METADATA, **{"__0_0.distcp": CHUNKS})
    for file, data in (("a.safetensors", SAFETENSORS), ("a.gguf", GGUF), ("a.bin", TORCH_ZIP), ("a.bin", TORCH_LEGACY)):
        assert look(file, data)


@FUZZ
@given(mutated(SAFETENSORS))
def test_mutated_safetensors(data: bytes) -> None:
    assert not look("model.safetensors", data) or _library_accepts(data)


@FUZZ
@given(mutated(GGUF))
def test_mutated_gguf(data: bytes) -> None:
    look("model.gguf", data)


@FUZZ
@given(mutated(TORCH_ZIP))
def test_mutated_torch_zip(data: bytes) -> None:
    look("pytorch_model.bin", data)


@FUZZ
@given(mutated(TORCH_LEGACY))
def test_mutated_torch_legacy(data: bytes) -> None:
    look("pytorch_model.bin", data)


def _distributed() -> tuple[bytes, bytes]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_distributed({"wte": torch.ones(5, 4), "b": torch.zeros(3), "step": 1}, checkpoint_id=folder, no_dist=True)
        return (Path(folder) / ".metadata").read_bytes(), (Path(folder) / "__0_0.distcp").read_bytes()


METADATA, CHUNKS = _distributed()


@FUZZ
@given(mutated(METADATA))
def test_mutated_distributed_metadata(data: bytes) -> None:
    look(".metadata", data, **{"__0_0.distcp": CHUNKS})


@FUZZ
@given(mutated(CHUNKS))
def test_mutated_distributed_chunks(data: bytes) -> None:
    look(".metadata", METADATA, **{"__0_0.distcp": data})


def test_bombs_stay_in_proportion() -> None:
    bombs: dict[str, Callable[[], bytes]] = {
        "a.safetensors": lambda: safetensors_bytes(b'{"a":[' + b"{}," * 100_000 + b"{}]}"),
        "b.safetensors": lambda: safetensors_bytes(b'{"a":' + b"[" * 300_000),
        "a.gguf": lambda: gguf_bytes([gguf_string("k") + struct.pack("<IIQ", 9, 8, 40_000) + bytes(8 * 40_000)]),
        "b.gguf": lambda: gguf_bytes([gguf_string("k") + struct.pack("<IIQ", 9, 0, 300_000) + bytes(300_000)]),
    }
    for file, build in bombs.items():
        look(file, build())
