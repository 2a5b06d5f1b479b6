"""`ghoststep census` as a command: exit codes, formats, streams."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ghoststep.census import run
from ghoststep.census import survey as survey_module
from ghoststep.cli.main import build_app
from ghoststep.errors import UsageError
from tests.census.fleet import LETTER_A, MAMBA, UNREACHABLE, Plan, files, write
from tests.local_hub import Fault, LocalHub


def call(*arguments: str | Path) -> Result:
    """The command in this process; our deliberate errors come through as they are."""
    app = build_app(("census", "checks"))
    result = CliRunner().invoke(app, ["census", *map(str, arguments)])
    if isinstance(result.exception, UsageError):
        raise result.exception
    return result


def test_the_exit_code_is_0_when_one_was_read(tmp_path: Path) -> None:
    folder = write(Plan(name="m", wiring=MAMBA, near=(LETTER_A,)), tmp_path)
    result = call(folder, tmp_path / "absent")
    assert result.exit_code == 0, result.output
    assert "1 → 1" in result.stdout
    assert "failed: " in result.stdout
    assert result.stderr == ""


def test_fail_on_reachable(tmp_path: Path) -> None:
    ill = write(Plan(name="ill", wiring=MAMBA, near=(LETTER_A,)), tmp_path)
    near_miss = write(Plan(name="near-miss", wiring=MAMBA, near=(UNREACHABLE,)), tmp_path)
    zero = write(Plan(name="zero", zero=(LETTER_A,)), tmp_path)
    assert call(ill, "--fail-on", "reachable").exit_code == 1
    assert call(zero, "--fail-on", "reachable").exit_code == 1
    assert call(near_miss, "--fail-on", "reachable").exit_code == 0


def test_the_exit_code_is_2_when_none_was_read(tmp_path: Path) -> None:
    result = call(tmp_path / "absent", f"{tmp_path}/no*")
    assert result.exit_code == 2
    assert result.stdout.count("does not exist") == 2


def test_json_csv_and_output(tmp_path: Path) -> None:
    folder = write(Plan(name="m"), tmp_path)
    document = json.loads(call(folder, "--format", "json").stdout)
    assert document["checkpoints"][0]["record"]["num_rows"] == 320
    assert next(csv.DictReader(io.StringIO(call(folder, "--format", "csv").stdout)))["dims"] == "8"
    assert call(folder, "--format", "csv-totals", "--output", tmp_path / "t.csv").stdout == ""
    assert next(csv.DictReader((tmp_path / "t.csv").open()))["tables"] == "1"


def test_list_state_and_remarks(tmp_path: Path) -> None:
    folders = [write(Plan(name=n, seed=i), tmp_path) for i, n in enumerate("ab")]
    (tmp_path / "list").write_text("\n".join(map(str, folders)))
    arguments = ("--list", tmp_path / "list", "--state", tmp_path / "s.jsonl", "--format", "csv", f"{tmp_path}/a")
    first, second = call(*arguments), call(*arguments)
    assert first.exit_code == second.exit_code == 0
    assert first.stdout == second.stdout
    assert "1 subjects were named more than once" in first.stderr
    assert "2 of 2 checkpoints came from --state" in second.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "nothing to count"),
        (("x", "--format", "html"), "csv-totals, json"),
        (("x", "--fail-on", "error"), "never or reachable"),
        (("x", "--jobs", "0"), "--jobs 0: expected 1 to 64"),
        (("x", "--timeout", "0"), "more than 0"),
        (("x", "--timeout", "nan"), "more than 0"),
        (("hf:org/*", "--offline"), "--list FILE"),
        (("x", "--output", "/absent/folder/x.csv"), "its folder does not exist"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call(*arguments)


def test_an_interrupt_prints_what_is_there_and_exits_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [write(Plan(name=n, seed=i), tmp_path) for i, n in enumerate("abc")]
    real = survey_module.survey

    def survey(opened: object, instruments: object) -> object:
        if getattr(opened, "subject", "").endswith("b"):
            raise KeyboardInterrupt
        return real(opened, instruments)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "survey", survey)
    result = call(*folders, "--jobs", "1", "--state", tmp_path / "s.jsonl")
    assert result.exit_code == 130
    assert "2 not reached before the interrupt" in result.stdout
    assert "interrupted after 1 of 3" in result.stderr
    monkeypatch.undo()
    assert "1 of 3 checkpoints came from" in call(*folders, "--state", tmp_path / "s.jsonl").stderr


def test_ctrl_c_does_not_wait_for_a_stalled_server(tmp_path: Path) -> None:
    with LocalHub() as hub:
        hub.add("org/slow", files(Plan(name="slow")))
        hub.faults.append(Fault(stall_seconds=60))
        folder = write(Plan(name="here"), tmp_path)
        state = tmp_path / "s.jsonl"
        command = [sys.executable, "-m", "ghoststep.cli.main", "census", "hf:org/slow", str(folder), "--state", str(state)]
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path / "cache")}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        deadline = time.monotonic() + 60
        while (not state.exists() or state.read_bytes().count(b"\n") < 2) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        out, err = process.communicate(timeout=30)
        assert process.returncode == 130, err
        assert time.monotonic() - sent < 10
        assert "1 not reached before the interrupt" in out
        assert "Traceback" not in err
