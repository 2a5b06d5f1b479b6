"""Opening checkpoints: which files count, what is refused, what a folder without weights can still do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ghoststep.errors import CannotLook, SubjectError
from ghoststep.subjects import open_subject
from ghoststep.subjects.checkpoint import Checkpoint, open_checkpoint
from ghoststep.subjects.containers.select import select_weights

WEIGHTS = {"wte.weight": torch.ones(8, 4)}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["model.safetensors", "pytorch_model.bin", "model.gguf"], ("model.safetensors",)),
        (["model.safetensors", "consolidated.safetensors"], ("model.safetensors",)),
        (["weights.safetensors", "consolidated.safetensors"], ("weights.safetensors",)),
        (["consolidated-00001.safetensors", "consolidated-00002.safetensors"],) * 2,
        (["adapter_model.safetensors", "extra.safetensors", "adapter_config.json"], ("adapter_model.safetensors",)),
        (["pytorch_model.bin", "training_args.bin", "optimizer.bin", "scheduler.pt"], ("pytorch_model.bin",)),
        (["last.ckpt"], ("last.ckpt",)),
        (["a.gguf", "b.gguf"], ("a.gguf", "b.gguf")),
        ([".metadata", "__0_0.distcp"], (".metadata",)),
        (["2_Dense/model.safetensors", "pytorch_model.bin"], ("pytorch_model.bin",)),
    ],
)
def test_which_files_are_the_weights(files: list[str], expected: object) -> None:
    selection = select_weights(files)
    assert selection is not None
    assert selection.files == tuple(expected)  # type: ignore[arg-type]
    assert selection.index is None


@pytest.mark.parametrize(
    "files",
    [[], ["config.json"], ["training_args.bin"], ["optimizer.pt"], [".metadata"], ["x/model.safetensors"]],
)
def test_what_is_no_weight_file(files: list[str]) -> None:
    assert select_weights(files) is None


def test_an_index_goes_before_everything() -> None:
    selection = select_weights(["model.safetensors.index.json", "model.safetensors", "model-00001-of-00001.safetensors"])
    assert selection is not None
    assert selection.index == "model.safetensors.index.json"
    variant = select_weights(["model.fp16.safetensors.index.json", "model.fp16-00001-of-00001.safetensors"])
    assert variant is not None
    assert variant.index == "model.fp16.safetensors.index.json"


def test_several_files_without_index_are_joined_unless_names_clash(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(2, 2)}, tmp_path / "two.safetensors")
    assert set(open_checkpoint(str(tmp_path)).stored().tensors) == {"a", "b"}
    save_file({"a": torch.zeros(2, 2)}, tmp_path / "two.safetensors")
    with pytest.raises(CannotLook, match=r"'a' stands in both one.safetensors and two.safetensors"):
        open_checkpoint(str(tmp_path)).stored()


def test_several_gguf_files_are_several_models(tmp_path: Path) -> None:
    (tmp_path / "q4.gguf").write_bytes(b"GGUF")
    (tmp_path / "q8.gguf").write_bytes(b"GGUF")
    with pytest.raises(CannotLook, match=r"q4.gguf, q8.gguf.*Name one"):
        open_checkpoint(str(tmp_path)).stored()


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_adapter_folder_names_its_base(tmp_path: Path, suffix: str) -> None:
    tensors = {
        "base_model.model.model.layers.0.q_proj.lora_A.weight": torch.ones(2, 4),
        "base_model.model.model.embed_tokens.modules_to_save.weight": torch.ones(8, 4),
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(3, 4),
    }
    file = tmp_path / f"adapter_model.{suffix}"
    save_file(tensors, file) if suffix == "safetensors" else torch.save(tensors, file)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    checkpoint = open_checkpoint(str(tmp_path))
    stored = checkpoint.stored()
    assert stored.base_model == "org/base"
    assert set(stored.tensors) == set(tensors)
    assert checkpoint.info().facts["base_model"] == "org/base"


def test_a_whole_model_has_no_base(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert open_checkpoint(str(tmp_path)).stored().base_model is None


def test_a_folder_without_weights_still_opens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    (tmp_path / "checkpoint-5").mkdir()
    save_file(WEIGHTS, tmp_path / "checkpoint-5" / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.read_json("config.json") == {"vocab_size": 8}
    assert checkpoint.read_json("generation_config.json") is None
    assert checkpoint.read_bytes("tokenizer.json") is None
    assert checkpoint.metadata() == {}
    with pytest.raises(CannotLook, match="Weights stand in checkpoint-5"):
        checkpoint.stored()
    with pytest.raises(CannotLook, match="Weights stand in checkpoint-5"):  # the same answer again
        checkpoint.rows("wte.weight")


def test_info_and_near_names(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(str(tmp_path))
    info = checkpoint.info()
    assert (info.kind, info.name) == ("checkpoint", str(tmp_path))
    assert dict(info.facts) == {"format": "safetensors", "weight_files": 1, "tensors": 1, "parameters": 32}
    assert checkpoint.metadata() == {"format": "pt"}
    with pytest.raises(CannotLook, match=r"no tensor 'wte.weigth'.*near names: wte.weight"):
        checkpoint.rows("wte.weigth")


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("model.h5", b"\x89HDF\r\n\x1a\n" + bytes(64), "HDF5"),
        ("weights.bin", b"\x89HDF\r\n\x1a\n" + bytes(64), "HDF5"),
        ("model.keras", b"PK\x03\x04" + bytes(64), "Keras"),
        ("weights.npz", b"PK\x03\x04" + bytes(64), "NumPy"),
        ("flax_model.msgpack", bytes(64), "Flax"),
        ("model.onnx", bytes(64), "ONNX"),
        ("model.tflite", b"\0\0\0\0TFL3" + bytes(64), "TensorFlow Lite"),
        ("model.ckpt.index", bytes(64), "TensorFlow checkpoint"),
        ("notes.txt", b"hello, this is text", "no weight file of a known format"),
    ],
)
def test_a_file_of_another_framework_is_named_and_refused(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SubjectError) as caught:
        open_checkpoint(str(tmp_path / name))
    for word in (what, "safetensors", "pytorch_model.bin", "GGUF", "distributed"):
        assert word in str(caught.value)


def test_a_folder_of_another_framework_is_named_and_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.hdf5").write_bytes(b"\x89HDF\r\n\x1a\n")
    with pytest.raises(SubjectError, match=r"weights.hdf5 \(HDF5 \(Keras\)\), which is not supported"):
        open_checkpoint(str(tmp_path))
    save_file(WEIGHTS, tmp_path / "model.safetensors")  # beside weights that are supported it is no matter
    assert open_checkpoint(str(tmp_path)).stored().tensors


def test_a_wrong_suffix_is_no_matter_for_a_lone_file(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "weights")
    assert open_checkpoint(str(tmp_path / "weights")).stored().format == "safetensors"
    torch.save(WEIGHTS, tmp_path / "step-100")
    assert open_checkpoint(str(tmp_path / "step-100")).stored().format == "pytorch"


@pytest.mark.parametrize(
    ("spec", "match"),
    [("nowhere/model", "hf:nowhere/model"), ("/nowhere", "does not exist"), ("a\0b", "cannot be opened|does not exist")],
)
def test_nothing_there(spec: str, match: str) -> None:
    with pytest.raises(SubjectError, match=match):
        open_subject(spec)


def test_open_subject_gives_a_checkpoint(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert isinstance(open_subject(str(tmp_path)), Checkpoint)


def test_reading_headers_imports_no_heavy_library(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    code = (
        "import sys; from ghoststep.subjects import open_subject; s = open_subject(sys.argv[1]).stored(); assert s.tensors; "
        "print(sorted({'torch', 'numpy', 'transformers', 'safetensors', 'gguf', 'huggingface_hub'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
