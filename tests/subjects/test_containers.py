"""Each container against the library that writes it: names, shapes, dtypes and the bytes of the rows."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save, save_file
from tests.local_hub import need_loopback
from tests.subjects.raw_files import MemorySource

from ghoststep.errors import CannotLook, SubjectError
from ghoststep.subjects.base import RowStore
from ghoststep.subjects.checkpoint import Checkpoint, open_checkpoint
from ghoststep.subjects.containers.gguf_types import GGML_TYPES

ROWS, DIMS = 37, 16


def table(dtype: torch.dtype = torch.float32, *, rows: int = ROWS, dims: int = DIMS, seed: int = 0) -> torch.Tensor:
    values = torch.randn(rows, dims, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype) if dtype.is_floating_point else (values * 10).to(dtype)


def raw(tensor: torch.Tensor) -> NDArray[np.uint8]:
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8).reshape(tensor.shape[0], -1).numpy() if tensor.numel() else np.zeros((0, 0), np.uint8)


def blocks(store: RowStore, size: int = 10) -> NDArray[np.uint8]:
    """All rows, read in blocks as the instruments do."""
    starts = range(0, store.num_rows, size)
    return np.concatenate([store.raw_rows(start, min(start + size, store.num_rows)) for start in starts])


class CountingSource(MemorySource):
    num_bytes = 0
    num_reads = 0

    def read(self, file: str, start: int, stop: int) -> bytes:
        self.num_bytes += stop - start
        self.num_reads += 1
        return super().read(file, start, stop)


DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8_e4m3",
    torch.float8_e5m2: "f8_e5m2",
    torch.uint8: "u8",
    torch.int32: "i32",
}


@pytest.mark.parametrize(("dtype", "name"), DTYPES.items(), ids=DTYPES.values())
@pytest.mark.parametrize("writer", ["safetensors", "torch", "torch-legacy"])
def test_rows_are_the_bytes_that_were_saved(tmp_path: Path, dtype: torch.dtype, name: str, writer: str) -> None:
    saved = {
        "embed.weight": table(dtype),
        "norm.weight": torch.ones(DIMS),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
    }
    if writer == "safetensors":
        save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(saved, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=writer == "torch")
    checkpoint = open_checkpoint(str(tmp_path))
    stored = checkpoint.stored()
    assert {key: tensor.shape for key, tensor in stored.tensors.items()} == {
        key: tuple(value.shape) for key, value in saved.items()
    }
    info = stored.tensors["embed.weight"]
    assert (info.dtype, info.num_bytes) == (name, ROWS * DIMS * dtype.itemsize)
    store = checkpoint.rows("embed.weight")
    assert (store.num_rows, store.num_dims, store.row_bytes) == (ROWS, DIMS, DIMS * dtype.itemsize)
    np.testing.assert_array_equal(blocks(store), raw(saved["embed.weight"]))
    assert checkpoint.rows("empty").raw_rows(0, 0).shape == (0, 16)
    with pytest.raises(CannotLook, match="expected a table"):
        checkpoint.rows("norm.weight")


def test_large_blocks_are_views_of_the_file_and_read_only(tmp_path: Path) -> None:
    save_file({"wte": table(rows=4096, dims=64)}, tmp_path / "model.safetensors")
    block = open_checkpoint(str(tmp_path)).rows("wte").raw_rows(0, 4096)
    assert not block.flags.owndata
    assert not block.flags.writeable
    with pytest.raises(IndexError):
        open_checkpoint(str(tmp_path)).rows("wte").raw_rows(0, 4097)


def test_saved_views_come_back_in_row_order(tmp_path: Path) -> None:
    base = table(rows=40, dims=24)
    saved = {
        "transposed": base.t(),
        "columns": base[:, 4:12],
        "rows": base[5:20],
        "every_other": base[::2, ::3],
        "expanded": base[:1].expand(6, 24),
        "parameter": torch.nn.Parameter(base.clone()),
    }
    torch.save(saved, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(str(tmp_path))
    for name, tensor in saved.items():
        np.testing.assert_array_equal(blocks(checkpoint.rows(name), 7), raw(tensor.detach()), err_msg=name)


def test_tied_weights_appear_under_both_names(tmp_path: Path) -> None:
    shared = table()
    torch.save({"wte": shared, "lm_head": shared}, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(str(tmp_path))
    np.testing.assert_array_equal(checkpoint.rows("wte").raw_rows(0, ROWS), checkpoint.rows("lm_head").raw_rows(0, ROWS))


@pytest.mark.parametrize(
    ("saved", "names"),
    [
        ({"epoch": 3, "state_dict": {"model.wte": table()}, "note": "x"}, {"model.wte"}),
        ({"model": {"wte": table()}, "ema": {"wte": table()}}, {"model.wte", "ema.wte"}),
        ({"wte": table(), "inner": {"w": table()}, "step": 1}, {"wte", "inner.w"}),
    ],
)
def test_training_checkpoints_yield_their_state_dict(tmp_path: Path, saved: dict[str, object], names: set[str]) -> None:
    torch.save(saved, tmp_path / "last.ckpt")
    assert set(open_checkpoint(str(tmp_path / "last.ckpt")).stored().tensors) == names


def write_shards(folder: Path, suffix: str) -> dict[str, torch.Tensor]:
    saved = {f"layers.{index}.weight": table(seed=index) for index in range(3)}
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = {}
    for index, (name, tensor) in enumerate(saved.items(), start=1):
        shard = f"{stem}-{index:05d}-of-00003.{suffix}"
        weight_map[name] = shard
        if suffix == "safetensors":
            save_file({name: tensor}, folder / shard)
        else:
            torch.save({name: tensor}, folder / shard)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return saved


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_one_checkpoint(tmp_path: Path, suffix: str) -> None:
    saved = write_shards(tmp_path, suffix)
    checkpoint = open_checkpoint(str(tmp_path))
    assert set(checkpoint.stored().tensors) == set(saved)
    assert checkpoint.info().facts["weight_files"] == 3
    for name, tensor in saved.items():
        np.testing.assert_array_equal(checkpoint.rows(name).raw_rows(0, ROWS), raw(tensor))
    index = next(tmp_path.glob("*.index.json"))
    assert set(open_checkpoint(str(index)).stored().tensors) == set(saved)


def test_a_lone_shard_is_no_checkpoint(tmp_path: Path) -> None:
    write_shards(tmp_path, "safetensors")
    with pytest.raises(SubjectError, match="one of 3 parts"):
        open_checkpoint(str(tmp_path / "model-00002-of-00003.safetensors"))
    (tmp_path / "model.safetensors.index.json").unlink()
    assert len(open_checkpoint(str(tmp_path)).stored().tensors) == 3
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CannotLook, match=r"1 of them missing: model-00003-of-00003\.safetensors"):
        open_checkpoint(str(tmp_path)).stored()


def test_opening_reads_headers_only_and_a_table_reads_itself_only() -> None:
    """What a remote place would have to send: no byte of a tensor before it is asked for, few requests."""
    saved = {f"layers.{index}.weight": table(rows=64, dims=64, seed=index) for index in range(20)}
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    for file, data in (("model.safetensors", save(saved)), ("pytorch_model.bin", buffer.getvalue())):
        source = CountingSource({file: data})
        checkpoint = Checkpoint(source)
        checkpoint.stored()
        assert source.num_bytes < 0.1 * len(data)
        assert source.num_reads <= 12
        source.num_bytes = 0
        checkpoint.rows("layers.7.weight").raw_rows(0, 64)
        assert 64 * 64 * 4 <= source.num_bytes <= 64 * 64 * 4 + 64


def test_any_source_will_do() -> None:
    saved = {"wte": table(torch.bfloat16)}
    source = MemorySource({"model.safetensors": save(saved), "config.json": b"{}"})
    np.testing.assert_array_equal(Checkpoint(source).rows("wte").raw_rows(3, 9), raw(saved["wte"])[3:9])


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "f16", "bf16", "f32"])
def test_gguf_against_its_own_writer(tmp_path: Path, name: str) -> None:
    dtype = gguf.GGMLQuantizationType[name.upper()]
    values = np.random.default_rng(0).standard_normal((ROWS, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, dtype) if name != "f32" else values
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_token_list([f"t{index}" for index in range(ROWS)])
    writer.add_token_types([1] * ROWS)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=dtype)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    info = checkpoint.stored().tensors["token_embd.weight"]
    assert (info.shape, info.dtype) == ((ROWS, 64), name)
    assert checkpoint.stored().tensors["output_norm.weight"].shape == (64,)
    store = checkpoint.rows("token_embd.weight")
    np.testing.assert_array_equal(blocks(store), np.ascontiguousarray(packed).view(np.uint8).reshape(ROWS, -1))
    dequantised = gguf.quants.dequantize(blocks(store), dtype)
    np.testing.assert_allclose(dequantised.reshape(ROWS, 64), values, atol=0.5)
    assert checkpoint.metadata()["tokenizer.ggml.tokens"] == tuple(f"t{index}" for index in range(ROWS))
    assert checkpoint.metadata()["general.architecture"] == "llama"


def test_our_gguf_types_are_those_of_the_package() -> None:
    theirs = {int(kind): (kind.name.lower(), *sizes) for kind, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    assert {code: GGML_TYPES[code] for code in theirs if code in GGML_TYPES} == {
        k: v for k, v in theirs.items() if k in GGML_TYPES
    }
    assert set(theirs) <= set(GGML_TYPES)


def test_split_gguf_needs_all_its_parts(tmp_path: Path) -> None:
    for part in (1, 2):
        writer = gguf.GGUFWriter(tmp_path / f"m-{part:05d}-of-00002.gguf", "llama")
        writer.add_tensor(f"blk.{part}.weight", np.ones((4, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert set(open_checkpoint(str(tmp_path)).stored().tensors) == {"blk.1.weight", "blk.2.weight"}
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CannotLook, match="m-00002-of-00002"):
        open_checkpoint(str(tmp_path)).stored()


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoint(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

    saved = {"model": {"wte": table(torch.bfloat16), "norm": torch.ones(4)}, "step": 7}
    save_distributed(saved, checkpoint_id=str(tmp_path), no_dist=True)
    checkpoint = open_checkpoint(str(tmp_path))
    stored = checkpoint.stored()
    assert {name: tensor.shape for name, tensor in stored.tensors.items()} == {"model.wte": (ROWS, DIMS), "model.norm": (4,)}
    assert stored.tensors["model.wte"].dtype == "bf16"
    np.testing.assert_array_equal(blocks(checkpoint.rows("model.wte")), raw(table(torch.bfloat16)))
    next(tmp_path.glob("*.distcp")).rename(tmp_path / "other.distcp")
    with pytest.raises(CannotLook, match=r"__0_0\.distcp"):
        open_checkpoint(str(tmp_path)).rows("model.wte")


_SHARDED_SAVE = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(37 * 16, dtype=torch.float32).reshape(37, 16)
    saved = {"rows": distribute_tensor(full, mesh, [Shard(0)]), "columns": distribute_tensor(full, mesh, [Shard(1)])}
    dcp.save(saved, checkpoint_id=f"{folder}/saved")
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(main, args=(sys.argv[1],), nprocs=2, start_method="fork")
"""


def test_chunks_of_two_ranks_make_one_table(tmp_path: Path) -> None:
    need_loopback()  # gloo connects its ranks over it
    script = tmp_path / "save.py"
    script.write_text(_SHARDED_SAVE)
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True, timeout=120)
    checkpoint = open_checkpoint(str(tmp_path / "saved"))
    full = torch.arange(ROWS * DIMS, dtype=torch.float32).reshape(ROWS, DIMS)
    for name in ("rows", "columns"):
        assert checkpoint.stored().tensors[name].shape == (ROWS, DIMS)
        np.testing.assert_array_equal(blocks(checkpoint.rows(name), 10), raw(full), err_msg=name)
