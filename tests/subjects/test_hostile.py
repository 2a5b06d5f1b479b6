"""Files that are damaged, or made to harm: each is refused with a message that says what is wrong, and nothing runs."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.subjects.raw_files import MemorySource, entry, gguf_bytes, gguf_string, gguf_tensor, safetensors_bytes

from ghoststep.errors import CannotLook, GhoststepError, SubjectError, UnsafeInput
from ghoststep.subjects.checkpoint import open_checkpoint
from ghoststep.subjects.containers.gguf_file import read_gguf_header
from ghoststep.subjects.containers.safetensors_file import read_header
from ghoststep.subjects.local import LocalSource, check_relative_name

ONE = {"a": entry([2, 2], 0, 16)}
NESTED = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"

SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "seven bytes": (b"\1\0\0\0\0\0\0", "too short"),
    "length 2^60": (safetensors_bytes(ONE, bytes(16), length=2**60), str(2**60)),
    "length 2^64-1": (safetensors_bytes(ONE, bytes(16), length=2**64 - 1), "header has"),
    "cut header": (safetensors_bytes(ONE)[:20], "truncated"),
    "cut data": (safetensors_bytes(ONE, bytes(15)), "truncated or its header lies"),
    "left over": (safetensors_bytes(ONE, bytes(17)), "1 bytes follow"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    "no json": (safetensors_bytes(b"{nonsense}"), "not the JSON object"),
    "no utf-8": (safetensors_bytes(b'{"\xff":1}'), "not the JSON object"),
    "json bomb": (safetensors_bytes(NESTED), "nests too deeply"),
    "a list": (safetensors_bytes([1]), "JSON list"),
    "twice": (
        safetensors_bytes(b'{"a":%s,"a":%s}' % ((json.dumps(ONE["a"]).encode(),) * 2), bytes(16)),
        "'a' stands there twice",
    ),
    "endless number": (
        safetensors_bytes(b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,16]}}' % (b"9" * 6000)),
        "not the JSON",
    ),
    "metadata": (safetensors_bytes({"__metadata__": {"a": [1]}}), "__metadata__"),
    "no entry": (safetensors_bytes({"a": 3}), "JSON int"),
    "lone surrogate": (safetensors_bytes(b'{"\\ud800":%s}' % json.dumps(ONE["a"]).encode(), bytes(16)), "Unicode"),
    "overlap": (safetensors_bytes({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, bytes(24)), "overlaps"),
    "same place": (safetensors_bytes({"a": entry([4], 0, 16), "b": entry([4], 0, 16)}, bytes(16)), "overlaps"),
    "gap": (safetensors_bytes({"a": entry([4], 0, 16), "b": entry([4], 20, 36)}, bytes(36)), "gap"),
    "backwards": (safetensors_bytes({"a": entry([4], 16, 0)}, bytes(16)), "stands at data bytes"),
    "wrong size": (safetensors_bytes({"a": entry([5], 0, 16)}, bytes(16)), "expected 20"),
    "negative": (safetensors_bytes({"a": entry([-2, -2], 0, 16)}, bytes(16)), "whole numbers"),
    "float": (safetensors_bytes({"a": entry([2.0, 2], 0, 16)}, bytes(16)), "whole numbers"),
    "nan": (safetensors_bytes({"a": entry([float("nan")], 0, 16)}, bytes(16)), "whole numbers"),
    "true": (safetensors_bytes({"a": entry([True, 4], 0, 16)}, bytes(16)), "whole numbers"),
    "huge": (safetensors_bytes({"a": entry([2**63, 2], 0, 16)}, bytes(16)), "whole numbers"),
    "huge product": (safetensors_bytes({"a": entry([2**40] * 60, 0, 16)}, bytes(16)), "its header lies"),
    "many dims": (safetensors_bytes({"a": entry([1] * 1000, 0, 4)}, bytes(4)), "whole numbers"),
    "text offsets": (safetensors_bytes({"a": entry([4], "0", 16)}, bytes(16)), "data_offsets"),
    "dtype": (safetensors_bytes({"a": entry([4], 0, 16, "F33")}, bytes(16)), "dtype 'F33'"),
    "dtype list": (safetensors_bytes({"a": entry([4], 0, 16, ["F32"])}, bytes(16)), "dtype"),
}


@pytest.mark.parametrize("content", SAFETENSORS.values(), ids=SAFETENSORS.keys())
def test_safetensors(content: tuple[bytes, str]) -> None:
    data, message = content
    with pytest.raises(CannotLook) as caught:
        read_header(MemorySource({"model.safetensors": data}), "model.safetensors")
    assert message in str(caught.value)
    assert "model.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_safetensors_near_misses_are_read() -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "none": entry([0, 2**40], 16, 16),
        "a": entry([2, 2], 0, 16),
        "scalar": entry([], 16, 20),
        "four": entry([3, 2], 20, 23, "F4"),
    }
    padded = json.dumps(header).encode() + b"   "  # writers pad with spaces
    read = read_header(MemorySource({"m": safetensors_bytes(padded, bytes(23))}), "m")
    assert {name: tensor.shape for name, tensor in read.tensors.items()} == {
        "none": (0, 2**40),
        "a": (2, 2),
        "scalar": (),
        "four": (3, 2),
    }


def string_pair(key: str, value: bytes) -> bytes:
    return gguf_string(key) + value


TENSOR = gguf_tensor("t", [8, 4])
GGUF: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "no magic": (b"GGUX" + bytes(40), "does not start with GGUF"),
    "version 1": (gguf_bytes(version=1), "version 1"),
    "big-endian": (gguf_bytes(version=0x03000000), "version"),
    "tensors 2^60": (gguf_bytes(num_tensors=2**60), "exhaust memory"),
    "pairs 2^60": (gguf_bytes(num_pairs=2**60), "exhaust memory"),
    "string 2^60": (gguf_bytes([struct.pack("<Q", 2**60) + bytes(20)]), "string of"),
    "string past end": (gguf_bytes([struct.pack("<Q", 5000) + bytes(20)]), "truncated"),
    "array 2^60": (gguf_bytes([string_pair("k", struct.pack("<IIQ", 9, 0, 2**60))]), "array of"),
    "array past end": (gguf_bytes([string_pair("k", struct.pack("<IIQ", 9, 10, 2**20))]), "truncated"),
    "strings past end": (gguf_bytes([string_pair("k", struct.pack("<IIQ", 9, 8, 2**20))]), "strings in an array"),
    "array of arrays": (gguf_bytes([string_pair("k", struct.pack("<IIQ", 9, 9, 1) + bytes(32))]), "nests arrays"),
    "unknown type": (gguf_bytes([string_pair("k", struct.pack("<I", 99) + bytes(32))]), "type 99"),
    "key twice": (gguf_bytes([string_pair("k", struct.pack("<IB", 0, 1))] * 2), "'k' stands there twice"),
    "tensor twice": (gguf_bytes(tensors=[TENSOR, TENSOR], data=bytes(128)), "'t' stands there twice"),
    "overlap": (gguf_bytes(tensors=[TENSOR, gguf_tensor("u", [8, 4], offset=32)], data=bytes(256)), "overlaps"),
    "past the end": (gguf_bytes(tensors=[TENSOR], data=bytes(100)), "truncated"),
    "many dims": (gguf_bytes(tensors=[gguf_tensor("t", [1] * 5)], data=bytes(64)), "5 dimensions"),
    "huge": (gguf_bytes(tensors=[gguf_tensor("t", [2**62, 2**62])], data=bytes(64)), "header lies"),
    "huge product": (gguf_bytes(tensors=[gguf_tensor("t", [2**40, 2**40])], data=bytes(64)), "truncated or"),
    "unknown tensor type": (gguf_bytes(tensors=[gguf_tensor("t", [8], kind=999)], data=bytes(64)), "type 999"),
    "broken block": (gguf_bytes(tensors=[gguf_tensor("t", [31, 2], kind=8)], data=bytes(256)), "multiple of 32"),
    "alignment 0": (gguf_bytes([string_pair("general.alignment", struct.pack("<II", 4, 0))]), "alignment"),
    "alignment 2^31": (gguf_bytes([string_pair("general.alignment", struct.pack("<II", 4, 2**31))]), "alignment"),
    "alignment text": (gguf_bytes([string_pair("general.alignment", struct.pack("<I", 8) + gguf_string("x"))]), "alignment"),
}


@pytest.mark.parametrize("content", GGUF.values(), ids=GGUF.keys())
def test_gguf(content: tuple[bytes, str]) -> None:
    data, message = content
    with pytest.raises(CannotLook) as caught:
        read_gguf_header(MemorySource({"model.gguf": data}), "model.gguf")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600


def test_gguf_near_misses_are_read() -> None:
    pairs = [
        string_pair("bytes", struct.pack("<I", 8) + gguf_string(b"\xff\xfe")),
        string_pair("none", struct.pack("<IIQ", 9, 8, 0)),
    ]
    read = read_gguf_header(
        MemorySource({"m": gguf_bytes(pairs, [TENSOR, gguf_tensor("empty", [8, 0], offset=128)], bytes(128))}), "m"
    )
    assert read.tensors["t"].shape == (4, 8)
    assert read.tensors["empty"].shape == (0, 8)
    assert read.metadata == {"bytes": "\ufffd\ufffd", "none": ()}


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "..\\secret", "a/../../b", "C:x", "", "a\0b", "./a", "a//b"]
)
def test_shard_names_stay_inside_the_folder(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2, 2)}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(UnsafeInput, match="expected a name inside the same folder"):
        open_checkpoint(str(folder)).stored()
    with pytest.raises(UnsafeInput):
        LocalSource(folder).read(shard, 0, 1)


def test_ordinary_names_pass() -> None:
    for name in ("model.safetensors", "sub/model.safetensors", "..model", "a..b", ".metadata"):
        assert check_relative_name(name, where="x") == name


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "nests too deeply"),
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "expected a file name"),
        ('{"weight_map": {"a": "gone.safetensors", "b": "m.safetensors"}}', "1 of them missing: gone.safetensors"),
        ('{"weight_map": {"a": "m.safetensors", "z": "m.safetensors"}}', "m.safetensors holds 'z', but it does not"),
    ],
)
def test_bad_indexes(tmp_path: Path, index: str, message: str) -> None:
    save_file({"a": torch.ones(2, 2)}, tmp_path / "m.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CannotLook, match=message):
        open_checkpoint(str(tmp_path)).stored()


def test_empty_folder_and_empty_file(tmp_path: Path) -> None:
    with pytest.raises(SubjectError, match=r"empty folder.*safetensors"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SubjectError, match="empty file"):
        open_checkpoint(str(tmp_path / "model.safetensors"))
    with pytest.raises(CannotLook, match="too short"):
        open_checkpoint(str(tmp_path)).stored()


def test_a_folder_of_other_things(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(SubjectError, match="no weights in this folder"):
        open_checkpoint(str(tmp_path))


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "sha"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2, 2)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert open_checkpoint(str(snapshot)).rows("a").raw_rows(0, 2).shape == (2, 8)
    (blobs / "0123").unlink()  # a broken link is no file
    with pytest.raises(SubjectError, match="empty folder"):
        open_checkpoint(str(snapshot))


def test_pipes_and_loops_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    (tmp_path / "loop").symlink_to(tmp_path)
    with pytest.raises(SubjectError, match="empty folder"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(SubjectError, match="a pipe"):
        open_checkpoint(str(tmp_path / "model.safetensors"))


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4096, 64)}, tmp_path / "model.safetensors")
    store = open_checkpoint(str(tmp_path)).rows("a")
    first = store.raw_rows(0, 4096)
    assert first[0, 3] == 0x3F
    del first
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(CannotLook, match="changed while it was read"):
        store.raw_rows(0, 4096)
    with pytest.raises(CannotLook, match="changed while it was read"):
        store.raw_rows(0, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [("[" * 200_000, "nests too deeply"), ("{", "not valid JSON"), ("[]", "JSON list"), ("\xff", "JSON")],
)
def test_bad_config(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(CannotLook, match=message):
        checkpoint.read_json("config.json")
    (tmp_path / "config.json").write_text('\ufeff{"a": 1}', encoding="utf-8")
    assert open_checkpoint(str(tmp_path)).read_json("config.json") == {"a": 1}
    with pytest.raises(CannotLook, match="more than the 4"):
        open_checkpoint(str(tmp_path)).read_json("config.json", limit_bytes=4)


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ghoststep.subjects.local._MAX_FILES", 5)
    for index in range(7):
        (tmp_path / f"{index}.txt").touch()
    with pytest.raises(GhoststepError, match="more than 5 files"):
        open_checkpoint(str(tmp_path))
