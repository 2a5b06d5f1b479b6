"""`ghoststep.check` as a call: subjects, cases, what counts as answered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ghoststep
from ghoststep.cases import group_subjects, unique_names
from tests.checkpoints import build


def one(kind: str, name: str) -> Any:
    return SimpleNamespace(kind=kind, name=name)


def names(*subjects: Any) -> list[list[str]]:
    return [[s.name for s in case] for case in group_subjects(subjects)]


def test_subjects_of_different_kinds_share_a_case_and_a_single_one_joins_all() -> None:
    a, b, corpus = one("checkpoint", "a"), one("checkpoint", "b"), one("corpus", "c")
    assert names(a) == [["a"]]
    assert names(a, corpus) == [["a", "c"]]
    assert names(corpus, a, b) == [["a", "c"], ["b", "c"]]
    assert unique_names(["m", "n", "m"]) == ["m", "n", "m (2)"]


def test_the_same_subject_twice_keeps_both_answers(tmp_path: Path) -> None:
    folder = build(tmp_path / "m")
    report = ghoststep.check(folder, folder, select=["GS301"])
    assert [v.subject for v in report.verdicts] == [str(folder), f"{folder} (2)"]


@pytest.mark.parametrize("given", [42, None, b"bytes"])
def test_what_cannot_be_checked_is_named(given: object) -> None:
    with pytest.raises(ghoststep.UsageError, match=type(given).__name__):
        ghoststep.check(given)


def test_unreadable_weights_never_pass_though_the_tokenizer_is_fine(tmp_path: Path) -> None:
    damaged = build(tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    report = ghoststep.check(damaged)
    assert report.exit_code == 2
    with pytest.raises(AssertionError, match="could not look"):
        report.raise_for("error")
    both = ghoststep.check(build(tmp_path / "good"), damaged)
    assert both.exit_code == 2


def test_a_table_that_is_mostly_dead_is_found_by_its_rows_not_by_its_median(tmp_path: Path) -> None:
    dead = build(tmp_path / "dead", input_rows=dict.fromkeys(range(10, 50), 1e-9))
    verdict = ghoststep.check(dead).verdict("GS301")
    assert len(verdict.findings) == 40
    assert ghoststep.check(build(tmp_path / "alive")).verdict("GS301").findings == ()


def test_what_the_call_says_wins_over_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "pyproject.toml"
    config.write_text('[tool.ghoststep]\nfail-on = "note"\nbaseline = "base.json"\n', encoding="utf-8")
    folder = build(tmp_path / "m", input_rows={2: 1e-12}, wiring="attention", template=None)
    plain = ghoststep.check(folder)
    assert [v.severity.value for v in plain.verdicts if v.findings] == ["note"]
    from ghoststep.report import render

    (tmp_path / "base.json").write_text(render(ghoststep.check(build(tmp_path / "clean")), "json"), encoding="utf-8")
    assert ghoststep.check(folder, config=config).exit_code == 1
    assert ghoststep.check(folder, config=config, fail_on="error").exit_code == 0
    (tmp_path / "base.json").write_text(render(plain, "json"), encoding="utf-8")
    accepted = ghoststep.check(folder, config=config)
    assert accepted.exit_code == 0
    assert accepted.raise_for("note") is accepted
