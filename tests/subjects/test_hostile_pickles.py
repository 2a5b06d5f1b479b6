"""PyTorch files that are damaged, or made to harm: refused with a message that says what is wrong, and nothing runs."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.subjects.raw_files import MemorySource

from ghoststep.errors import CannotLook, UnsafeInput
from ghoststep.subjects.checkpoint import Checkpoint, open_checkpoint


class _Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("writer", ["zip", "legacy", "bare pickle", "dcp"])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, writer: str) -> None:
    marker = tmp_path / "was-run"
    folder = tmp_path / "model"
    folder.mkdir()
    value = {"wte": torch.ones(4, 4), "extra": _Payload(marker)}
    if writer == "dcp":
        (folder / ".metadata").write_bytes(pickle.dumps(_Payload(marker)))
        (folder / "__0_0.distcp").write_bytes(b"x")
    elif writer == "bare pickle":
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Payload(marker)))
    else:
        torch.save(value, folder / "pytorch_model.bin", _use_new_zipfile_serialization=writer == "zip")
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(CannotLook) as caught:
        checkpoint.stored()
    if writer != "bare pickle":  # that one is refused before it is looked into
        assert isinstance(caught.value, UnsafeInput)
        assert "posix.mkdir" in str(caught.value)
        assert "Nothing was executed" in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("opcode", [pickle.INST, pickle.OBJ, pickle.EXT1, pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.POP])
def test_pickle_instructions_that_no_weights_need_are_refused(opcode: bytes) -> None:
    body = {
        pickle.INST: b"(iposix\nsystem\n",
        pickle.EXT1: b"\x82\1",
        pickle.BYTEARRAY8: b"\x96" + struct.pack("<Q", 2) + b"xx",
    }
    data = b"\x80\x02" + body.get(opcode, b"}" + opcode) + b"."
    with pytest.raises(UnsafeInput, match="which no saved weights need"):
        Checkpoint(MemorySource({"pytorch_model.bin": torch_zip(data)})).stored()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02",
        b".",
        b"0.",
        b"}}.",
        b"\x80\x02}(K\1t.",
        b"h\5.",
        b"\x80\x02X\xff\xff\xff\xff.",
        b"]])\x94u.",
        b"(((.",
        b"}K\1s.",
    ],
)
def test_damaged_pickles(data: bytes) -> None:
    with pytest.raises(CannotLook):
        Checkpoint(MemorySource({"pytorch_model.bin": torch_zip(data)})).stored()


def test_a_key_that_is_a_tower_of_tuples_does_not_hang() -> None:
    tower = b")" + b"q\1h\1\x86" * 60  # each level holds the one below twice: its hash would take 2^60 steps
    data = b"\x80\x02}" + tower + b"K\1s."
    with pytest.raises(CannotLook, match="a key of type tuple"):
        Checkpoint(MemorySource({"pytorch_model.bin": torch_zip(data)})).stored()


def test_a_pickle_cannot_fill_the_memory() -> None:
    data = b"\x80\x02" + b"]" * 300_000 + b"."
    with pytest.raises(UnsafeInput, match="on its stack"):
        Checkpoint(MemorySource({"pytorch_model.bin": torch_zip(data)})).stored()


def torch_zip(data_pkl: bytes, members: dict[str, bytes] | None = None, *, compress: bool = False) -> bytes:
    """A zip archive as torch.save lays it out."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data_pkl)
        for name, content in (members or {}).items():
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def test_torch_archives_that_lie(tmp_path: Path) -> None:
    torch.save({"wte": torch.ones(64, 64)}, tmp_path / "m.bin")
    good = (tmp_path / "m.bin").read_bytes()
    with zipfile.ZipFile(tmp_path / "m.bin") as archive:
        pkl = archive.read("m/data.pkl")
    cases: dict[str, tuple[bytes, str]] = {
        "cut": (good[: len(good) // 2], "damaged or truncated"),
        "no storage": (torch_zip(pkl), "are missing"),
        "short storage": (torch_zip(pkl, {"data/0": bytes(100)}), "needs a storage of 16384 bytes"),
        "zip bomb": (torch_zip(pkl, {"data/0": bytes(16384)}, compress=True), "compressed"),
        "big-endian": (torch_zip(pkl, {"data/0": bytes(16384), "byteorder": b"big"}), "big-endian"),
        "no pickle": (good.replace(b"data.pkl", b"data.pkx"), "0 data.pkl"),
        "shape past storage": (
            torch_zip(pkl.replace(b"K@K@", b"M\xff\xffK@"), {"data/0": bytes(16384)}),
            "reaches past its storage",
        ),
        "text": (b"hello hello hello", "expected a zip archive"),
    }
    assert Checkpoint(MemorySource({"pytorch_model.bin": torch_zip(pkl, {"data/0": bytes(16384)})})).stored().tensors
    for name, (data, message) in cases.items():
        with pytest.raises(CannotLook) as caught:
            Checkpoint(MemorySource({"pytorch_model.bin": data})).stored()
        assert message in str(caught.value), name
