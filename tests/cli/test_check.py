"""`ghoststep check` as a program: subjects, formats, exit codes, configuration, hostile input."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import ghoststep
from ghoststep.cli.main import main
from ghoststep.report import FORMATS
from tests.checkpoints import SPECIALS, WORDS, build

EVIL = "<script>alert(1)</script>\x1b[31m\u202e]]>"


@dataclass
class Done:
    """What a run of the command line left: like `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: object, cwd: Path | None = None, **environment: str) -> Done:
    """The command line in this process: the same `main`, without importing torch again for every test."""
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["ghoststep", *map(str, arguments)])
        patch.chdir(cwd or before)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    return Done(code, out.getvalue(), err.getvalue())


def run_program(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "ghoststep.cli.main", *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )


def codes(text: str, *, with_outcome: str = "found") -> dict[str, str]:
    return {v["code"]: v["severity"] for v in json.loads(text)["verdicts"] if v["outcome"] == with_outcome}


@pytest.fixture
def gated(tmp_path: Path) -> Path:
    """Untied and gated, one word's row decayed."""
    return build(tmp_path / "gated", input_rows={10: 1e-30})


def test_a_decayed_row_is_an_error_and_its_healthy_twin_clear(tmp_path: Path, gated: Path) -> None:
    done = run_program("check", gated, "--format", "json")
    assert (done.returncode, codes(done.stdout)) == (1, {"GS301": "error"})
    (finding,) = next(v for v in json.loads(done.stdout)["verdicts"] if v["code"] == "GS301")["findings"]
    assert finding["where"]["token"] == WORDS[10 - len(SPECIALS)]
    assert finding["measured"]["value"] == pytest.approx(1e-30, rel=1e-6)
    healthy = run("check", build(tmp_path / "healthy"), "--format", "json")
    assert (healthy.returncode, codes(healthy.stdout)) == (0, {})


def test_the_last_line_counts_what_could_not_be_looked_at(tmp_path: Path) -> None:
    bare = build(tmp_path / "bare", tokenizer=False)
    done = run("check", bare)
    assert done.returncode == 0
    report = json.loads(run("check", bare, "--format", "json").stdout)
    count = report["summary"]
    assert count["unknown"] >= 3  # nothing about tokens can be said
    last = f"{count['clear']} clear · 0 found · {count['not_applicable']} not applicable · {count['unknown']} could not look · 0 broken"
    assert done.stdout.rstrip().splitlines()[-1] == last
    assert run("check", bare, "--strict").returncode == 2
    allowed = codes(json.dumps(report), with_outcome="unknown")
    assert run("check", bare, "--strict", "--allow-unknown", ",".join(allowed)).returncode == 0


def test_nothing_answered_exits_2(tmp_path: Path) -> None:
    bare = build(tmp_path / "bare", tokenizer=False)
    done = run("check", bare, "--select", "GS001,GS009")
    assert done.returncode == 2
    assert done.stdout.rstrip().endswith("0 clear · 0 found · 0 not applicable · 2 could not look · 0 broken")


@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_escapes_tokens_from_strangers(tmp_path: Path, format_: str) -> None:
    folder = build(
        tmp_path / "evil",
        wiring="attention",
        input_rows={4: 0.0},
        specials=[*SPECIALS, EVIL],
        template="{% for m in messages %}" + EVIL + "{{ m.content }}{% endfor %}",
    )
    done = run("check", folder, "--format", format_, FORCE_COLOR="1" if format_ == "terminal" else "0")
    assert done.returncode == 1, done.stderr
    assert "script" in done.stdout  # the token is shown
    assert "\x1b[31m\u202e" not in done.stdout
    assert "\u202e" not in done.stdout
    if format_ in ("markdown", "junit"):
        assert "<script>" not in done.stdout
    if format_ == "junit":
        ET.fromstring(done.stdout)
    if format_ in ("json", "sarif"):
        json.loads(done.stdout)
    assert "<script>" not in ghoststep.check(folder)._repr_html_()


def test_output_file_colours_and_width(tmp_path: Path, gated: Path) -> None:
    target = tmp_path / "report.json"
    done = run("check", gated, "--format", "json", "--output", target)
    assert done.stdout == ""
    assert json.loads(target.read_text(encoding="utf-8"))["exit_code"] == 1
    assert "\x1b" not in run("check", gated).stdout
    assert "\x1b" in run("check", gated, FORCE_COLOR="1").stdout
    assert "\x1b" not in run("check", gated, FORCE_COLOR="1", NO_COLOR="1").stdout
    narrow = run("check", gated, COLUMNS="80").stdout
    assert max(map(len, narrow.splitlines())) <= 80
    assert "cannot be written" in run("check", gated, "--output", tmp_path / "no" / "where").stderr


def test_training_kind_decides(tmp_path: Path, gated: Path) -> None:
    assert run("check", gated, "--training", "lora").returncode == 0
    template_row = build(tmp_path / "template", wiring="attention", input_rows={3: 0.0})
    assert codes(run("check", template_row, "--format", "json", "--training", "lora").stdout) == {"GS303": "error"}
    assert "expected one of" in run("check", gated, "--training", "fully").stderr


def test_configuration_acceptance_and_baseline(tmp_path: Path, gated: Path) -> None:
    config = tmp_path / "pyproject.toml"
    config.write_text(
        '[[tool.ghoststep.accept]]\ncode = "GS301"\ntable-row = 10\nreason = "known"\nuntil = 2999-01-01\n', encoding="utf-8"
    )
    accepted = run("check", gated, "--format", "json", cwd=tmp_path)
    assert accepted.returncode == 0
    assert codes(accepted.stdout)["GS301"] == "note"
    config.write_text("[tool.ghoststep]\nselct = []\n", encoding="utf-8")
    wrong = run("check", gated, cwd=tmp_path)
    assert wrong.returncode == 2
    assert "selct" in wrong.stderr
    config.unlink()
    baseline = tmp_path / "base.json"
    run("check", gated, "--format", "json", "--output", baseline)
    assert run("check", gated, "--baseline", baseline).returncode == 0
    worse = build(tmp_path / "gated", input_rows={10: 1e-30, 11: 1e-30})
    new = run("check", worse, "--baseline", baseline, "--format", "json")
    assert new.returncode == 1
    (verdict,) = (v for v in json.loads(new.stdout)["verdicts"] if v["code"] == "GS301")
    assert [f["where"]["table_row"] for f in verdict["findings"]] == [11]
    assert "cannot be read" in run("check", gated, "--baseline", tmp_path / "none.json").stderr


def test_select_and_ignore_name_what_they_do_not_know(gated: Path) -> None:
    assert run("check", gated, "--ignore", "GS3").returncode == 0
    done = run("check", gated, "--select", "near-zero-rows")
    assert done.returncode == 2
    assert "near-zero-input-rows" in done.stderr


def test_two_subjects_are_told_apart(tmp_path: Path, gated: Path) -> None:
    healthy = build(tmp_path / "healthy")
    report = json.loads(run("check", gated, healthy, "--format", "json").stdout)
    by_subject = {v["subject"]: v["outcome"] for v in report["verdicts"] if v["code"] == "GS301"}
    assert sorted(by_subject.values()) == ["clear", "found"]
    assert len(by_subject) == 2


def test_the_same_subject_gives_the_same_report(gated: Path) -> None:
    def stable(text: str) -> object:
        report = json.loads(text)
        for verdict in report["verdicts"]:
            verdict.pop("seconds")
        report.pop("seconds", None)
        return report

    assert stable(run("check", gated, "--format", "json").stdout) == stable(run("check", gated, "--format", "json").stdout)


def test_checking_changes_no_file(gated: Path) -> None:
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(gated.iterdir())}
    run("check", gated)
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(gated.iterdir())} == before


def _header(folder: Path, length: int, body: bytes) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + body)


def _shards(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _overlap(folder: Path) -> None:
    one = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
    header = json.dumps({"model.embed_tokens.weight": one, "lm_head.weight": {**one, "data_offsets": [32, 96]}}).encode()
    _header(folder, len(header), header + bytes(96))


class _Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch pwned",)


def _pickle(folder: Path) -> None:
    import torch

    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": torch.ones(4, 4), "x": _Code()}, folder / "pytorch_model.bin")


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
        "beyond|truncated|short",
    ),
    "header of 2^60 bytes": (lambda f: _header(f, 2**60, b"{}"), "1152921504606846976|header"),
    "overlapping offsets": (_overlap, "overlap"),
    "missing shard": (lambda f: _shards(f, "model-00001-of-00002.safetensors"), "model-00001-of-00002"),
    "shard outside the folder": (lambda f: _shards(f, "../secret.safetensors"), r"\.\./secret"),
    "pickle with code": (_pickle, "code|posix|system|not allowed|refus"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_weights_are_named_and_never_clear(tmp_path: Path, name: str) -> None:
    damage, expected = HOSTILE[name]
    folder = build(tmp_path / "hostile", wiring="attention")
    damage(folder)
    done = run_program("check", folder, "--format", "json", cwd=tmp_path)
    assert done.returncode in (0, 2), done.stderr  # config and tokenizer may still be judged
    said = done.stderr + done.stdout
    assert re.search(expected, said), said
    if done.stdout:
        outcomes = {v["code"]: v["outcome"] for v in json.loads(done.stdout)["verdicts"]}
        assert outcomes["GS301"] == outcomes["GS302"] == outcomes["GS008"] == "unknown"
        assert "broken" not in outcomes.values()
    assert not list(tmp_path.rglob("pwned"))


def test_a_config_that_wants_remote_code_is_read_and_not_run(tmp_path: Path) -> None:
    folder = build(tmp_path / "remote", config={"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}})
    (folder / "modeling.py").write_text("open('pwned', 'w')\n", encoding="utf-8")
    done = run("check", folder, cwd=tmp_path)
    assert done.returncode == 0
    assert not list(tmp_path.rglob("pwned"))


def test_a_config_without_vocabulary_size_is_no_obstacle(tmp_path: Path) -> None:
    folder = build(tmp_path / "sizeless", input_rows={10: 1e-12})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert codes(run("check", folder, "--format", "json").stdout) == {"GS301": "error"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: p.mkdir(), "nothing|empty|no weights"),
        (lambda p: None, "not exist|no such|not found"),
        (lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64)), "HDF5.*safetensors"),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_the_next_step(tmp_path: Path, make: object, expected: str) -> None:
    target = tmp_path / "subject.h5"
    make(target)  # type: ignore[operator]
    done = run("check", target)
    assert done.returncode == 2
    assert re.search(expected, done.stderr, re.IGNORECASE), done.stderr
    assert done.stdout == ""


def lines(verdicts: Sequence[ghoststep.Verdict]) -> list[str]:
    return [v.code for v in verdicts if v.findings]


def test_the_python_call_gives_the_same_answer(gated: Path) -> None:
    report = ghoststep.check(gated)
    assert lines(report.verdicts) == ["GS301"]
    assert report.exit_code == 1
    with pytest.raises(AssertionError, match="GS301"):
        report.raise_for("error")
    assert ghoststep.check(gated, training="lora").raise_for("error").exit_code == 0
    with pytest.raises(ghoststep.UsageError):
        ghoststep.check()
