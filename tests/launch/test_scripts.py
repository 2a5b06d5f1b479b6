"""`ghoststep run` on unmodified scripts: what they print, compute and end with stays, and what they lose is found."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ghoststep.evidence.steps import StepOutcome
from ghoststep.subjects.run import open_run
from tests.launch.running import GHOSTSTEP, LOST, SCRIPTS, assert_found, bare, call, start, watched

COPY = """
import copy, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
for _ in range(30):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""


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


def test_code_on_the_command_line(tmp_path: Path) -> None:
    """As `python -c`: argv, the first place that imports look at, the exit code, and no other arguments of its own are ours."""
    code = (
        "import sys\nprint(sys.argv, repr(sys.path[0]))\nfrom tests.launch.scripts import ending\nending.train()\nsys.exit(7)"
    )
    plain = call([sys.executable, "-c", code, "--strict", "-m"], tmp_path)
    done = call([*GHOSTSTEP, "run", "--run-dir", "run", "--", "-c", code, "--strict", "-m"], tmp_path)
    assert plain.stdout.startswith("['-c', '--strict', '-m'] ''")
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) == (7, plain.stdout), done.stderr
    assert_found(done, *LOST)


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


def test_an_optimizer_of_a_copy_is_told_as_such(tmp_path: Path) -> None:
    """The copy is gone when the optimizer steps; what runs is another model, which nothing trains."""
    done = call([*GHOSTSTEP, "run", "--no-record", "--", "-c", COPY], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing trained was seen: an optimizer stepped, but its 2 tensors belong to no module" in done.stderr
    assert "built from a copy of the model" in done.stderr


def test_without_a_record_started_processes_are_not_denied(tmp_path: Path) -> None:
    done = watched("idle.py", "torch", cwd=tmp_path, options=("--no-record",))
    assert "ran with gradients in this process; processes that it started are in no report with --no-record" in done.stderr
    assert "in this process" not in watched("idle.py", "torch", cwd=tmp_path).stderr


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
    assert re.search(r"GS401 zeroed-step +would have seen", done.stderr)  # clear
    again = watched("ending.py", "0", cwd=tmp_path, options=options)  # and the record that this model goes on with is
    assert_found(again, "table row 17", "in step 52")  # 12 steps after the 40 of the first start
    assert "in step 12" not in again.stderr
    assert (again.returncode, "instead" in again.stderr) == (1 if options else 0, False), again.stderr


@pytest.mark.parametrize("options", [(), ("--fail-on", "error")])
def test_steps_of_an_earlier_start_are_not_this_runs(tmp_path: Path, options: tuple[str, ...]) -> None:
    bad = watched("other.py", "bad", cwd=tmp_path, options=options)
    assert (bad.returncode, "GS404 hidden-nan-loss" in bad.stderr) == (1 if options else 0, True), bad.stderr
    good = watched("other.py", cwd=tmp_path, options=options)
    assert good.returncode == 0, good.stderr
    assert "the loss is NaN" not in good.stderr
    assert "the steps up to 40 are not judged here" in good.stderr
    assert re.search(r"GS404 hidden-nan-loss +would have seen .*; 40 steps looked at", good.stderr)
    whole = call([*GHOSTSTEP, "check", "run"], tmp_path)
    assert (whole.returncode, "the loss is NaN in step 12" in whole.stdout) == (1, True), whole.stdout


def test_two_models_of_one_class_are_told_apart_without_a_record(tmp_path: Path) -> None:
    done = watched("pair.py", cwd=tmp_path, options=("--no-record", "--format", "json"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [s["name"] for s in report["subjects"]] == ["Sequential", "Sequential (2)"]
    assert {(v["code"], v["subject"]) for v in report["verdicts"] if v["code"] == "GS404" and v["outcome"] == "found"} == {
        ("GS404", "Sequential (2)")
    }


def test_the_record_of_two_models_is_checked_whole(tmp_path: Path) -> None:
    watched("pair.py", cwd=tmp_path)
    for named in (["run"], ["run", "run/model-2"]):  # the second record, if it is named too, is taken once
        later = call([*GHOSTSTEP, "check", *named, "--select", "GS4", "--format", "json"], tmp_path)
        assert later.returncode == 1, later.stderr
        report = json.loads(later.stdout)
        assert [s["name"] for s in report["subjects"]] == ["run", "run/model-2"]
        assert {v["subject"] for v in report["verdicts"] if v["outcome"] == "found"} == {"run/model-2"}


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
