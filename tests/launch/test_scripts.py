"""`ghoststep run` on unmodified scripts: what they print, compute and end with stays, and what they lose is found."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ghoststep.evidence.steps import StepOutcome
from ghoststep.subjects.run import open_run
from tests.launch.running import GHOSTSTEP, LOST, SCRIPTS, assert_found, bare, call, start, watched


@pytest.mark.parametrize("workers", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_plain_script_prints_and_computes_the_same_and_its_lost_steps_are_found(tmp_path: Path, workers: str) -> None:
    plain = bare("plain.py", workers)
    done = watched("plain.py", workers, cwd=tmp_path)
    assert (plain.returncode, done.returncode) == (0, 0), done.stderr
    assert done.stdout == plain.stdout  # argv, file, loss, random numbers, digests of all weights
    assert_found(done, *LOST, "2 steps of 40")
    assert sorted(p.name for p in (tmp_path / "run").iterdir() if p.suffix != ".tmp")[0] == "ghoststep-run.json"
    assert not list((tmp_path / "run").glob("model-*"))  # the teacher, with gradients on but without optimizer, is not watched
    assert done.stderr.count("nothing trained") == 0  # of the workers and pool processes none says a word


@pytest.mark.parametrize(
    ("how", "code"), [("crash", 1), ("interrupt", -signal.SIGINT), ("7", 7), pytest.param("words", 1, marks=pytest.mark.slow)]
)
def test_the_end_stays_the_scripts_own_and_the_report_is_there(tmp_path: Path, how: str, code: int) -> None:
    done = watched("ending.py", how, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert_found(done, *LOST)
    if how != "7":
        plain = bare("ending.py", how)
        assert plain.returncode == code
        assert plain.stderr in done.stderr  # the traceback, line by line


def test_after_a_hard_exit_the_record_is_there(tmp_path: Path) -> None:
    done = watched("ending.py", "hard", cwd=tmp_path)
    assert done.returncode == 9
    assert "1 error" not in done.stderr
    said = call([*GHOSTSTEP, "check", "run", "--select", "GS4"], tmp_path)
    assert all(word in said.stdout for word in LOST), said.stdout


def _until_trained(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "trained\n"


@pytest.mark.parametrize("script", ["ending.py", "stuck.py"])
def test_sigterm_ends_it_by_the_signal_with_the_record_closed(tmp_path: Path, script: str) -> None:
    process = start([*GHOSTSTEP, "run", "--run-dir", "run", "--", str(SCRIPTS / script), "wait"], tmp_path)
    try:
        _until_trained(process)
        begun = time.monotonic()
        process.terminate()
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGTERM
    if script == "ending.py":
        assert all(word in stderr for word in LOST), stderr
        assert "ended closed" in stderr
    else:
        # The main thread is away in C, or about to be: it ends all the same, and not much later than without us.
        assert time.monotonic() - begun < 30


def test_a_module(tmp_path: Path) -> None:
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import sys; print(sys.argv[1:], sys.path[0], __spec__.name); sys.exit(4)\n")
    plain = call([sys.executable, "-m", "training", "--lr", "1"], tmp_path)
    done = call([*GHOSTSTEP, "run", "--", "-m", "training", "--lr", "1"], tmp_path)
    assert (done.returncode, done.stdout) == (4, plain.stdout)
    assert "nothing trained was seen: torch was not imported" in done.stderr
    assert not (tmp_path / "ghoststep-runs").exists()


@pytest.mark.parametrize(("how", "why"), [((), "torch was not imported"), (("torch",), "no module with an optimizer ran")])
def test_nothing_trained(tmp_path: Path, how: tuple[str, ...], why: str) -> None:
    done = watched("idle.py", *how, cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout == bare("idle.py", *how).stdout
    assert done.stderr.splitlines() == [
        line for line in done.stderr.splitlines() if "nothing trained was seen" in line and why in line
    ]
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "text", ["import os; os.environ['CUSTOM'] = 'ran'", "raise RuntimeError('theirs')", "import no_such_thing_xyz"]
)
def test_a_sitecustomize_of_the_user_runs_as_it_would(tmp_path: Path, text: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(text)
    env = {"PYTHONPATH": str(tmp_path)}
    plain = call([sys.executable, str(SCRIPTS / "idle.py")], tmp_path, env)
    done = watched("idle.py", cwd=tmp_path, env=env)
    assert done.stdout == plain.stdout  # sys.path too
    assert plain.stderr.strip() in done.stderr
    assert ("ran" in done.stdout) == ("CUSTOM" in text)


def test_a_fault_of_ours_is_told_and_hurts_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from ghoststep.launch import session\ndef open(*a): raise ZeroDivisionError('planted')\nsession.Session.open = open\n"
    )
    done = watched("plain.py", "fork", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, bare("plain.py", "fork").stdout)
    assert "planted" in done.stderr
    assert "nothing trained was seen" in done.stderr


def test_fail_on_changes_only_a_good_end(tmp_path: Path) -> None:
    for how, code in (("0", 1), ("7", 7)):
        done = watched("ending.py", how, cwd=tmp_path, options=("--no-record", "--fail-on", "error"))
        assert done.returncode == code, done.stderr
        assert_found(done, *LOST)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [(), ("--fail-on", "error")])  # told by the script's own process, and by its parent
def test_an_earlier_models_record_in_the_folder_is_not_this_runs(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert_found(watched("ending.py", "0", cwd=tmp_path), *LOST)
    done = watched("other.py", cwd=tmp_path, options=options)
    assert done.returncode == 0, done.stderr
    assert f"recorded in {tmp_path / 'run' / 'model-2'} instead, since" in done.stderr
    assert "is the record of another model" in done.stderr
    assert "table row 17" not in done.stderr
    assert "GS401 zeroed-step           would have seen" in done.stderr  # clear
    again = watched("ending.py", "0", cwd=tmp_path, options=options)  # and the record that this model goes on with is
    assert_found(again, *LOST)
    assert (again.returncode, "instead" in again.stderr) == (1 if options else 0, False), again.stderr


def test_the_report_where_the_user_wants_it(tmp_path: Path) -> None:
    done = watched("ending.py", "0", cwd=tmp_path, options=("--no-record", "--format", "json"))
    assert done.returncode == 0
    found = [v for v in json.loads(done.stdout)["verdicts"] if v["outcome"] == "found"]
    assert [(v["code"], v["findings"][0]["where"]["step"]) for v in found] == [("GS401", 12)]
    assert "verdicts in" not in done.stderr
    done = watched("ending.py", "0", cwd=tmp_path, options=("--output", "report.txt", "--sink", "jsonl:steps.jsonl"))
    assert "GS401" in (tmp_path / "report.txt").read_text()
    assert done.stdout == ""
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) >= 40


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--policy", "stop"), 1, ("stopped by the policy",)),
        (("--policy", "GS401=raise"), 1, ("LostStepError: GS401 zeroed-step at step 12",)),
    ],
)
def test_policies_that_end_the_script(tmp_path: Path, options: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    done = watched("ending.py", "0", cwd=tmp_path, options=options)
    assert done.returncode == code, done.stderr
    assert_found(done, "table row 17", *words)


def test_a_policy_that_skips_the_step(tmp_path: Path) -> None:
    done = watched("ending.py", "0", cwd=tmp_path, options=("--policy", "GS401=skip-step", "--strict"))
    assert done.returncode == 0, done.stderr
    (rank,) = open_run(str(tmp_path / "run")).record().ranks
    assert [s.number for s in rank.steps if s.outcome is StepOutcome.SKIPPED_BY_POLICY] == [12]


@pytest.mark.slow
def test_models_of_a_sweep_are_let_go(tmp_path: Path) -> None:
    done = watched("sweep.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, bare("sweep.py").stdout), done.stderr
    assert done.stdout.endswith("True\n")
    runs = [open_run(str(tmp_path / "run" / name)) for name in ("", "model-2", "model-3")]
    assert [len(r.record().ranks[0].steps) for r in runs] == [105, 105, 5]


@pytest.mark.parametrize("backend", ["counting", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_models_stay_whole_and_each_gets_a_watch(tmp_path: Path, backend: str) -> None:
    plain = bare("compiled.py", backend)  # fullgraph=True: a graph break of ours would raise
    done = watched("compiled.py", backend, cwd=tmp_path)
    assert (plain.returncode, done.returncode) == (0, 0), (plain.stderr, done.stderr)
    assert done.stdout == plain.stdout
    assert "UserWarning" not in done.stderr
    assert done.stderr.count("ERROR  GS401 zeroed-step") == 2
    assert_found(done, "in step 12", "in step 15", "model-2")
