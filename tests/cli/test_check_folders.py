"""`ghoststep check` of a folder that is no run itself: runs inside it, or around it, are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ghoststep
from ghoststep.errors import SubjectError
from tests.cli.test_check import run


def recorded(folder: Path) -> Path:
    """A run of three steps."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ghoststep.watch(model, optimizer, run_dir=folder):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    return folder


def test_runs_inside_are_named(tmp_path: Path) -> None:
    for name in ("b", "a", "d", "c"):
        recorded(tmp_path / "runs" / name)
    (tmp_path / "runs" / "notes.txt").write_text("mine")
    (tmp_path / "runs" / "empty").mkdir()
    done = run("check", "runs/", cwd=tmp_path)
    assert done.returncode == 2
    assert "runs/ is no run itself; 4 runs are inside (a, b, c, ...): name one, `ghoststep check runs/a`" in unwrapped(
        done.stderr
    )
    assert run("check", "runs/a", cwd=tmp_path).returncode == 0
    with pytest.raises(SubjectError, match="4 runs are inside"):
        ghoststep.check(tmp_path / "runs")


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_strange_names_are_escaped_and_quoted(tmp_path: Path) -> None:
    recorded(tmp_path / "runs" / "my run")
    with pytest.raises(SubjectError, match=r"1 run is inside \(my run\): name one, `ghoststep check '.*/runs/my run'`"):
        ghoststep.check(tmp_path / "runs")
    recorded(tmp_path / "evil" / "a\x1b[31m\nb")
    with pytest.raises(SubjectError, match=r"\(a\\x1b\[31m\\nb\).*escaped here") as raised:
        ghoststep.check(tmp_path / "evil")
    assert str(raised.value).isprintable()


def test_a_folder_of_more_than_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ghoststep.subjects import run as runs

    recorded(tmp_path / "runs" / "a")
    monkeypatch.setattr(runs, "MAX_LOOKED_AT", 1)
    with pytest.raises(SubjectError, match="at least 1 run is inside"):
        ghoststep.check(tmp_path / "runs")


def test_the_folder_of_one_rank_names_its_run(tmp_path: Path) -> None:
    rank = recorded(tmp_path / "a") / "rank-00000"
    batches = rank / "batches"
    batches.mkdir()
    for _ in range(2):
        with pytest.raises(SubjectError, match=r"one rank's part of a run: name the run, `ghoststep check .*/a`"):
            ghoststep.check(rank)
        save_file({"0/input_ids": torch.zeros(1, 4)}, batches / "step-000003.safetensors")  # reads like a checkpoint
    other = tmp_path / "rank-00000"
    other.mkdir()
    with pytest.raises(SubjectError, match="is an empty folder"):
        ghoststep.check(other)


def test_other_folders_keep_their_own_words(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SubjectError, match="is an empty folder") as raised:
        ghoststep.check(tmp_path / "empty")
    assert "run" not in str(raised.value).replace(str(tmp_path), "")
    recorded(tmp_path / "outputs" / "record")
    (tmp_path / "outputs" / "model.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    with pytest.raises(SubjectError, match=r"1 run is inside \(record\).* As a checkpoint: .*model\.h5"):
        ghoststep.check(tmp_path / "outputs")
