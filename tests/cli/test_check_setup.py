"""`ghoststep check FILE:function` as a program: what the user's file prints, and where it exits."""

from __future__ import annotations

import json
from pathlib import Path

from .test_check import run

SETUP = """
import sys
import torch
print("noise while imported")

def setup():
    print("noise in setup")
    model = torch.nn.Linear(4, 3)
    return {"model": model, "batch": {"x": torch.randn(4, 4)}, "loss_fn": loss_fn}

def loss_fn(model, batch):
    print("noise in the loss")
    return model(batch["x"]).mean()

def exits():
    sys.exit()
"""


def test_what_a_setup_prints_stays_out_of_the_report(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SETUP, encoding="utf-8")
    done = run("check", f"{path}:setup", "--format", "json", "--select", "GS4")
    assert json.loads(done.stdout)["exit_code"] == done.returncode == 0
    for noise in ("while imported", "in setup", "in the loss"):
        assert f"noise {noise}" in done.stderr


def test_a_setup_that_exits_is_no_success(tmp_path: Path) -> None:
    path, output = tmp_path / "mine.py", tmp_path / "report.json"
    path.write_text(SETUP, encoding="utf-8")
    done = run("check", f"{path}:exits", "--format", "json", "--output", output)
    assert (done.returncode, done.stdout, output.exists()) == (2, "", False)
    assert "called sys.exit() in exits()" in done.stderr


def test_a_python_file_without_its_function(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SETUP, encoding="utf-8")
    done = run("check", path)
    assert done.returncode == 2
    assert f"ghoststep check {path}:setup" in done.stderr


def test_a_symptom_that_nothing_matches_is_no_answer() -> None:
    done = run("explain", "--symptom", "zzz")
    assert done.returncode == 2
    assert "Known symptoms" in done.stdout
    assert run("explain", "--symptom", "never stops").returncode == 0
