"""Batches are kept within a bound, written once, and run again."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ghoststep.errors import SubjectError, UsageError
from ghoststep.subjects.setup import make_setup
from ghoststep.subjects.setup_batches import PlacedBatch
from ghoststep.watching import forensics
from ghoststep.watching.forensics import BatchKeeper, batch_path, decode_tokens
from ghoststep.watching.replay import kept_steps, load_batches, replay


def ids(step: int, shape: tuple[int, ...] = (2, 4)) -> torch.Tensor:
    return torch.full(shape, step)


def test_a_batch_comes_back_as_it_was(tmp_path: Path) -> None:
    keeper = BatchKeeper()
    batch: dict[str, Any] = {
        "input_ids": torch.arange(8).reshape(2, 4),
        "attention_mask": torch.ones(2, 4, dtype=torch.bool),
        "weights": torch.tensor([0.1, -0.0, float("nan")], dtype=torch.bfloat16),
        "nested": {"a/b": torch.arange(3)[::2], "50%": {"deep": torch.tensor(5)}},
        "texts": ["one", "two\n"],
        "flag": True,
        "nothing": None,
        "function": len,
    }
    keeper.keep(7, batch)
    batch["input_ids"].zero_()  # a loader with a fixed buffer
    path, why = keeper.save(7, 0, tmp_path)
    assert (path, why) == (batch_path(tmp_path, 0, 7), "")
    assert path is not None
    assert path.name == "step-000007.safetensors"
    (kept,) = load_batches(path)
    back = kept.value
    assert torch.equal(back["input_ids"], torch.arange(8).reshape(2, 4))
    assert back["attention_mask"].dtype == torch.bool
    assert back["weights"].view(torch.int16).tolist() == batch["weights"].view(torch.int16).tolist()
    assert torch.equal(back["nested"]["a/b"], torch.tensor([0, 2]))
    assert back["nested"]["50%"]["deep"].item() == 5
    assert (back["texts"], back["flag"], back["nothing"]) == (["one", "two\n"], True, None)
    assert kept.missing == {"function": "values of type builtin_function_or_method are not kept"}
    assert list(path.parent.iterdir()) == [path]


def test_micro_batches_and_tuples(tmp_path: Path) -> None:
    keeper = BatchKeeper()
    keeper.keep(3, (ids(1), None, ids(2)))
    keeper.keep(3, [ids(3)])
    keeper.keep(3, ids(4))
    path, _ = keeper.save(3, 1, tmp_path)
    assert path is not None
    batches = load_batches(path)
    assert [len(b.value) for b in batches] == [3, 1, 1]
    assert batches[0].value[1] is None
    assert torch.equal(batches[2].value[0], ids(4))
    assert not any(b.missing for b in batches)


def test_the_window_and_the_bound(tmp_path: Path) -> None:
    keeper = BatchKeeper(max_bytes=1000, num_steps=4)
    for step in range(1, 7):
        keeper.keep(step, {"input_ids": ids(step)})  # 64 bytes each
    assert [bool(keeper.batches(s)) for s in range(1, 7)] == [False, False, True, True, True, True]
    assert keeper.dropped == {}
    keeper.keep(7, {"input_ids": ids(7, (110,))})  # 880 bytes
    assert [bool(keeper.batches(s)) for s in range(4, 8)] == [False, False, True, True]
    assert sum(keeper.dropped.values()) == 2
    assert keeper._num_bytes <= 1000
    path, why = keeper.save(4, 0, tmp_path)
    assert path is None
    assert "no longer kept" in why
    assert "larger than 1000 bytes together" in why


def test_large_floats_are_left_out_and_ids_stay(tmp_path: Path) -> None:
    keeper = BatchKeeper()
    pixels = torch.zeros(forensics.MAX_FLOAT_BYTES // 4 + 1)
    sparse = torch.eye(3).to_sparse()
    keeper.keep(1, {"input_ids": ids(1), "pixels": pixels, "sparse": sparse, "long": "x" * 20_000})
    assert list(keeper.batches(1)[0]) == ["input_ids"]
    assert len(keeper.dropped) == 3
    path, _ = keeper.save(1, 0, tmp_path)
    assert path is not None
    (kept,) = load_batches(path)
    assert list(kept.missing) == ["pixels", "sparse", "long"]


def test_never_overwritten_and_at_most_sixteen(tmp_path: Path) -> None:
    keeper = BatchKeeper()
    keeper.keep(1, {"input_ids": ids(1)})
    path, _ = keeper.save(1, 0, tmp_path)
    assert path is not None
    content = path.read_bytes()
    again = BatchKeeper()
    again.keep(1, {"input_ids": ids(99)})
    assert again.save(1, 0, tmp_path) == (path, "")
    assert path.read_bytes() == content
    for step in range(2, 20):
        keeper.keep(step, {"input_ids": ids(step)})
        keeper.save(step, 0, tmp_path)
    assert sorted(kept_steps(tmp_path)) == list(range(1, 17))
    assert keeper.save(18, 0, tmp_path) == (None, "16 batches are kept already")


def test_a_race_for_the_same_file_keeps_the_first(tmp_path: Path) -> None:
    path = batch_path(tmp_path, 0, 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"first")
    forensics._write(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_is_told_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = BatchKeeper()
    keeper.keep(1, {"input_ids": ids(1)})

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    path, why = keeper.save(1, 0, tmp_path)
    keeper.save(1, 0, tmp_path)
    assert path is None
    assert "No space left" in why
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert list(batch_path(tmp_path, 0, 1).parent.iterdir()) == []


def test_keeping_reads_nothing_on_the_host() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = {"input_ids": torch.ones(2, 4, dtype=torch.int64, device="cuda"), "labels": torch.ones(2, 4, device="cuda")}
        keeper = BatchKeeper()
        for step in range(100):
            keeper.keep(step, batch)
    assert len(keeper.batches(99)) == 1


class Hostile:
    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        if ids[0] > 2:
            raise IndexError("unknown id")
        return ["\x1b[31mred", "\ufffd", ""][ids[0]]

    def id_to_token(self, token_id: int) -> str | None:
        return {1: "<0xE2>"}.get(token_id)


def test_tokens_are_decoded_raw_and_failures_left_out() -> None:
    assert decode_tokens(Hostile(), [0, 1, 2, 3, 0]) == {0: "\x1b[31mred", 1: "<0xE2>"}
    assert decode_tokens(object(), [1]) == {}


def test_tokens_of_real_tokenizers() -> None:
    from tokenizers import Tokenizer, models

    plain = Tokenizer(models.WordLevel({"a": 0, "Ġb": 1, "[UNK]": 2}, unk_token="[UNK]"))
    assert decode_tokens(plain, [0, 1, 9]) == {0: "a", 1: "Ġb"}
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")
    assert decode_tokens(wrapped, [0, 2]) == {0: "a", 2: "[UNK]"}


def save(tmp_path: Path, *batches: Any, step: int = 5) -> Path:
    keeper = BatchKeeper()
    for batch in batches:
        keeper.keep(step, batch, by_loop=True)
    path, why = keeper.save(step, 0, tmp_path)
    assert path is not None, why
    return path


def test_replay_puts_the_batch_into_the_setup(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.ones(2, 4)}, {"x": torch.zeros(2, 4)})
    setup = make_setup(
        {"model": torch.nn.Linear(4, 3), "batch": {"x": torch.randn(8, 4)}, "loss_fn": lambda m, b: m(b["x"]).mean()},
        name="mine",
    )
    made = replay(tmp_path, 5, setup)
    assert made.name == "mine, batch of step 5"
    assert [b["x"].sum().item() for b in made.batches] == [8.0, 0.0]
    assert made.accumulation_steps == 2
    assert made.model is setup.model
    assert len(setup.batches) == 1


def test_replay_of_a_tuple(tmp_path: Path) -> None:
    save(tmp_path, (torch.ones(2, 4),))
    made = replay(tmp_path, 5, make_setup({"model": torch.nn.Linear(4, 3)}))
    assert isinstance(made.batches[0], PlacedBatch)
    assert made.accumulation_steps == 1


def test_replay_says_what_is_missing(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.ones(2, 4)})
    model = torch.nn.Linear(4, 3)
    with pytest.raises(UsageError, match=r"step 9 was not kept; kept are those of steps: 5"):
        replay(tmp_path, 9, make_setup({"model": model}))
    with pytest.raises(UsageError, match=r"of rank 3 was not kept"):
        replay(tmp_path, 5, make_setup({"model": model}), rank=3)
    setup = make_setup({"model": model, "batch": {"x": torch.ones(1, 4), "y": torch.ones(1)}, "loss_fn": lambda m, b: b["y"]})
    with pytest.raises(UsageError, match=r"y of the setup's own batch.*w\.step\(loss, batch\)"):
        replay(tmp_path, 5, setup)


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", (2**40).to_bytes(8, "little") + b"{}", b"\x02\0\0\0\0\0\0\0{}"],
)
def test_a_hostile_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = batch_path(tmp_path, 0, 5)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(SubjectError, match="not a batch that ghoststep kept"):
        load_batches(path)


@pytest.mark.parametrize("about", ["[]", "{}", '{"micro_batches": 3}', '{"micro_batches": [{}]}', '{"micro_batches": []}', "{"])
def test_hostile_metadata_is_refused(tmp_path: Path, about: str) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "step-000001.safetensors"
    save_file({"0/x": torch.ones(1)}, path, {"ghoststep": about})
    with pytest.raises(SubjectError, match="not a batch"):
        load_batches(path)


SETUP = """
import torch
def setup():
    return {"model": torch.nn.Linear(4, 3), "batch": {"x": torch.ones(2, 4)}, "loss_fn": lambda m, b: m(b["x"]).mean()}
"""


def test_check_run_step_setup(tmp_path: Path) -> None:
    from tests.cli.test_check import run

    save(tmp_path / "run", {"x": torch.full((2, 4), float("nan"))})
    (tmp_path / "mine.py").write_text(SETUP, encoding="utf-8")
    setup = f"{tmp_path / 'mine.py'}:setup"
    done = run("check", tmp_path / "run", "--step", "5", "--setup", setup, "--format", "json", "--select", "nonfinite-loss")
    report = json.loads(done.stdout)
    assert report["subjects"][0]["name"].endswith("batch of step 5")
    assert report["summary"]["error"] == 1, report
    healthy = json.loads(run("check", setup, "--format", "json", "--select", "nonfinite-loss").stdout)
    assert healthy["summary"]["error"] == 0
    assert run("check", tmp_path / "run", "--step", "6", "--setup", setup).returncode == 2
    assert "go together" in run("check", tmp_path / "run", "--step", "5").stderr
    assert "go together" in run("check", tmp_path / "run", "--setup", setup).stderr
    assert "one run" in run("check", "hf:a/b", "--step", "5", "--setup", setup).stderr
