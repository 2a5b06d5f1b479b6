"""`ghoststep run` on scripts of Accelerate, Lightning and transformers, and on commands that start several processes."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.launch.running import GHOSTSTEP, LOST, SCRIPTS, assert_found, bare, call, watched

ON_RANK_1 = ("GS401 zeroed-step", "table row 17", "position 8 of example 1", "in step 12", "on rank 1", "ranks 2")


def _port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(("script", "step"), [("accelerated.py", "in step 6"), ("lit.py", "in step 12")])
def test_frameworks(tmp_path: Path, script: str, step: str) -> None:
    plain = bare(script)
    done = watched(script, cwd=tmp_path)
    assert (plain.returncode, done.returncode) == (0, 0), (plain.stderr, done.stderr)
    assert done.stdout == plain.stdout
    assert_found(done, "GS401 zeroed-step", "table row 17", "position 8 of example 1", step)


@pytest.mark.slow
def test_four_trainings_of_a_trainer_whose_own_log_shows_nothing(tmp_path: Path) -> None:
    plain = bare("trained.py")
    done = watched("trained.py", cwd=tmp_path)
    assert (plain.returncode, done.returncode) == (0, 0), (plain.stderr, done.stderr)
    own = [[line for line in d.stdout.splitlines() if "train_runtime" not in line] for d in (plain, done)]
    assert own[0] == own[1]  # logs and digests
    assert not any(word in own[1][3] for word in ("inf", "nan"))  # the overflow, as the Trainer tells it
    errors = {
        line.split("(")[1].split(")")[0].rpartition("run")[2]: line.split("ERROR")[1].split("(")[0].strip()
        for line in done.stderr.splitlines()
        if line.startswith(" ERROR ")
    }
    assert errors == {
        "": "GS401 zeroed-step",
        "/model-2": "GS403 nan-by-infinite-clip",
        "/model-3": "GS402 crushed-step",
        "/model-4": "GS401 zeroed-step",
    }
    assert done.stderr.count("ghoststep: GS4") == 4
    assert_found(
        done,
        *LOST[1:],
        "position 0 of example 1",
        "(norm 5.66e-30)",
        "(norm 5.66e-12)",
    )


@pytest.mark.parametrize("style", ["run torchrun", pytest.param("torchrun run", marks=pytest.mark.slow)])
def test_two_ranks_are_one_report_that_names_the_guilty_one(tmp_path: Path, style: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", _port()]
    if style == "run torchrun":
        command = [*GHOSTSTEP, "run", "--", *["torchrun", *torchrun[3:]], str(SCRIPTS / "ranks.py")]
    else:
        command = [*torchrun, "-m", "ghoststep.cli.main", "run", "--", str(SCRIPTS / "ranks.py")]
    done = call(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert_found(done, *ON_RANK_1)
    assert done.stderr.count("verdicts in") == 1
    (record,) = (tmp_path / "ghoststep-runs").iterdir()
    assert sorted(p.name for p in record.glob("rank-*")) == ["rank-00000", "rank-00001"]
    if style == "torchrun run":
        plain = call([*torchrun[:-1], _port(), str(SCRIPTS / "ranks.py")], tmp_path)
        assert done.stdout == plain.stdout  # the digest of the weights


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_the_script_starts(tmp_path: Path, method: str) -> None:
    done = watched("spawned.py", method, _port(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_found(done, *ON_RANK_1)
    assert done.stderr.count("verdicts in") == 1


@pytest.mark.slow
def test_accelerate_launch_and_python_as_commands(tmp_path: Path) -> None:
    launch = ["accelerate", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    for start, script in ((launch, ["accelerated.py"]), (["python"], ["ending.py", "7"])):
        done = call([*GHOSTSTEP, "run", "--no-record", "--", *start, str(SCRIPTS / script[0]), *script[1:]], tmp_path)
        assert done.returncode == (7 if start == ["python"] else 0), done.stderr
        assert_found(done, "GS401 zeroed-step", "table row 17")


def test_a_python_that_shuts_us_out_is_told(tmp_path: Path) -> None:
    done = call([*GHOSTSTEP, "run", "--", "python", "-E", str(SCRIPTS / "idle.py")], tmp_path)
    assert done.returncode == 3
    assert done.stderr == "ghoststep run: nothing trained was seen (Python's option -E keeps ghoststep out of the process)\n"
