"""What `ghoststep run` refuses before anything starts, and how it reads what stands after `--`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ghoststep.cli.run import _policy, _refuse_sinks
from ghoststep.errors import UsageError
from ghoststep.launch.plan import Plan, default_run_dir, rank_of
from ghoststep.launch.script import python_command
from tests.launch.running import GHOSTSTEP, SCRIPTS, call


def test_a_plan_travels_whole() -> None:
    plan = Plan(
        run_dir="/a b", policy={"GS401": "stop"}, strict=True, sinks=("jsonl:x", "wandb"), tokenizer="t", fail_on="note"
    )
    assert Plan.decode(plan.encode()) == plan


def test_ranks_of_one_launch_share_a_folder_and_runs_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = [
        {"RANK": str(r), "TORCHELASTIC_ERROR_FILE": f"/tmp/torchelastic_x/none_ab1/attempt_0/{r}/error.json"} for r in (0, 1)
    ]
    assert len({default_run_dir(e) for e in ranks}) == 1
    assert [rank_of(e) for e in ranks] == [0, 1]
    first = default_run_dir({})
    first.mkdir(parents=True)
    assert default_run_dir({}) != first
    slurm = default_run_dir({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"})
    assert slurm.name == "slurm-12.0"


def test_scripts_modules_and_commands(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    for target in ([str(script), "--lr", "1"], ["-m", "pkg.train", "x"], ["-c", "print(1)", "--strict"]):
        command = python_command(target)
        assert command is not None
        assert command[0] == sys.executable
        assert command[-len(target) :] == target
    assert python_command(["torchrun", "train.py"]) is None
    with pytest.raises(UsageError, match="no such file"):
        python_command([str(tmp_path / "none.py")])
    with pytest.raises(UsageError, match="options of ghoststep go before"):
        python_command(["--strict", "train.py"])
    with pytest.raises(UsageError, match="-c needs a program"):
        python_command(["-c"])


def test_policies_are_refused_before_the_script_starts() -> None:
    assert _policy([], strict=False) is None
    assert _policy(["stop"], strict=False) == "stop"
    assert _policy(["GS401=skip-step", "GS4=warn"], strict=True) == {"GS401": "skip-step", "GS4": "warn"}
    for given, words in (
        (["GS401=skip-step"], "--strict"),
        (["GS401=rollback"], "guard"),
        (["GS401=explode"], "no action"),
        (["GS999=stop"], "no check"),
        (["stop", "GS401=warn"], "alone"),
    ):
        with pytest.raises(UsageError, match=words):
            _policy(given, strict=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sink", "carrier-pigeon"], "carrier-pigeon"),
        (["--sink", "jsonl"], "needs a path"),
        (["--sink", "prometheus:nine"], "needs a port"),
        (["--detail", "some"], "--detail"),
        (["--format", "papyrus"], "papyrus"),
        (["--no-record", "--run-dir", "x"], "exclude"),
        (["--run-dir", "."], "holds other things"),
    ],
)
def test_bad_options_start_nothing(tmp_path: Path, options: list[str], words: str) -> None:
    (tmp_path / "thesis.tex").write_text("")
    done = call([*GHOSTSTEP, "run", *options, "--", str(SCRIPTS / "idle.py")], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sink_without_its_library_is_refused_before_the_script_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for spec, package in (("wandb:p", "wandb"), ("prometheus:9464", "prometheus-client")):
        with pytest.raises(UsageError, match=f"needs the package {package}: pip install {package}"):
            _refuse_sinks([spec])
    _refuse_sinks(["jsonl:steps.jsonl"])


def test_an_unknown_command_is_told(tmp_path: Path) -> None:
    done = call([*GHOSTSTEP, "run", "--", "no-such-program-xyz", "a"], tmp_path)
    assert done.returncode == 2
    assert "no such script, and no such command" in done.stderr


def test_help_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['ghoststep', 'run', '--help']\nfrom ghoststep.cli.main import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    print([m for m in ('torch', 'numpy', 'ghoststep.engine') if m in sys.modules])\n"
    done = call([sys.executable, "-c", code], tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--fail-on" in done.stdout
