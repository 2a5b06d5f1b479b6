"""Configuration, acceptances, exit codes."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from ghoststep.checks.tool.expired_acceptance import expired_acceptance
from ghoststep.checks.tool.unused_acceptance import unused_acceptance
from ghoststep.config import Acceptance, Config, accept, check_options, exit_code, find_config, load_config
from ghoststep.errors import ConfigError, UsageError
from ghoststep.evidence.tool import AcceptanceUse, ToolRun
from ghoststep.finding import Basis, Finding, Outcome, Severity, Verdict, Where
from ghoststep.registry import Clear, Found, NotApplicable, Unknown, load

TODAY = datetime.date(2026, 12, 1)


def write(folder: Path, text: str) -> Path:
    path = folder / "pyproject.toml"
    path.write_text(text, encoding="utf-8")
    return path


def verdict(*findings: Finding, outcome: Outcome = Outcome.FOUND, code: str = "GS301", **more: object) -> Verdict:
    base = Verdict(code=code, name="near-zero-input-rows", outcome=outcome, severity=Severity.ERROR, basis=Basis.PROOF)
    return replace(base, findings=findings, **more)  # type: ignore[arg-type]


def row(table_row: int, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(message="m", where=Where(table_row=table_row, file="folder/model.safetensors"), severity=severity)


def test_the_whole_table_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        [tool.ghoststep]
        select = ["GS3"]
        fail-on = "warning"
        training = "lora"
        allow-unknown = ["GS308"]
        [tool.ghoststep.checks.near-zero-input-rows]
        norm-limit = 1e-7
        [[tool.ghoststep.accept]]
        code = "GS306"
        token-id = 5
        reason = "reserved"
        until = 2027-03-01
        """,
    )
    config = load_config(path)
    assert config.select == ("GS3",)
    assert config.accept[0].until == datetime.date(2027, 3, 1)
    assert config.accept[0].place == "GS306 token_id=5"
    assert check_options(config, load(with_instruments=False)) == {"near-zero-input-rows": {"norm_limit": 1e-7}}
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert find_config(below) == path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[tool.ghoststep]\nselct = ['GS3']", "selct"),
        ("[tool.ghoststep]\nselect = 'GS3'", "select"),
        ("[[tool.ghoststep.accept]]\ncode = 'GS301'\nreason = 'r'", "until"),
        ("[[tool.ghoststep.accept]]\ncode = 'GS301'\nuntil = 2027-01-01", "reason"),
        ("[[tool.ghoststep.accept]]\ncode='GS301'\nreason='r'\nuntil=2027-01-01\ntokn=1", "tokn"),
        ("[tool.ghoststep", "TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize(
    ("checks", "error", "expected"),
    [
        ({"near-zero-rows": {}}, UsageError, "did you mean near-zero-input-rows"),
        ({"GS301": {"norm-limt": 1.0}}, ConfigError, "norm-limit"),
        ({"GS301": {"norm-limit": "small"}}, ConfigError, "float"),
    ],
)
def test_options_are_strict(checks: dict[str, dict[str, object]], error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        check_options(Config(checks=checks), load(with_instruments=False))


def acceptance(until: datetime.date = TODAY, **more: object) -> Acceptance:
    return Acceptance(code="GS301", reason="known", until=until, **more)  # type: ignore[arg-type]


def test_an_acceptance_takes_out_what_it_names_until_its_day_has_passed() -> None:
    found = verdict(row(1), row(2, Severity.WARNING))
    (kept,), counts = accept([found], [acceptance(table_row=1)], TODAY)
    assert [f.where.table_row for f in kept.findings] == [2]
    assert (kept.severity, kept.accepted, counts) == (Severity.WARNING, 1, (1,))
    (all_gone,), _ = accept([found], [acceptance(file="model.safetensors")], TODAY)
    assert (all_gone.outcome, all_gone.severity, all_gone.accepted) == (Outcome.FOUND, Severity.NOTE, 2)
    assert "known" in (all_gone.reason or "")
    (back,), counts = accept([found], [acceptance(TODAY - datetime.timedelta(days=1))], TODAY)
    assert back == found
    assert counts == (2,)
    (other,), counts = accept([found], [acceptance(table_row=9)], TODAY)
    assert other == found
    assert counts == (0,)


def use(days_left: int, num_matched: int = 1, checked: bool = True) -> ToolRun:
    until = TODAY + datetime.timedelta(days=days_left)
    one = AcceptanceUse(
        place="GS301", reason="r", until=until, days_left=days_left, num_matched=num_matched, checked=checked, file="p.toml"
    )
    return ToolRun(acceptances=(one,))


def test_acceptances_warn_fourteen_days_ahead_and_after() -> None:
    assert isinstance(expired_acceptance(use(15)), Clear)
    for days in (14, 0, -3):
        assert isinstance(expired_acceptance(use(days)), Found)
    assert isinstance(expired_acceptance(ToolRun()), NotApplicable)


def test_an_unused_acceptance_is_found_only_if_its_check_could_look() -> None:
    assert isinstance(unused_acceptance(use(99, num_matched=0)), Found)
    assert isinstance(unused_acceptance(use(99, num_matched=1)), Clear)
    assert isinstance(unused_acceptance(use(99, num_matched=0, checked=False)), Unknown)


ERROR = verdict(row(1))
NOTE = verdict(row(1, Severity.NOTE), severity=Severity.NOTE)
CLEAR, UNKNOWN = verdict(outcome=Outcome.CLEAR), verdict(outcome=Outcome.UNKNOWN)
NOT, BROKEN = verdict(outcome=Outcome.NOT_APPLICABLE), verdict(outcome=Outcome.BROKEN)
TOOL_CLEAR = verdict(outcome=Outcome.CLEAR, code="GS901")


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([CLEAR], 0),
        ([CLEAR, UNKNOWN], 0),
        ([NOTE], 0),
        ([ERROR, CLEAR], 1),
        ([ERROR, BROKEN], 2),
        ([UNKNOWN, NOT, TOOL_CLEAR], 2),
        ([], 2),
    ],
)
def test_exit_codes(verdicts: list[Verdict], expected: int) -> None:
    assert exit_code(verdicts, fail_on=Severity.ERROR, strict=False, allow_unknown=()) == expected


def test_strict_counts_what_could_not_be_looked_at() -> None:
    assert exit_code([CLEAR, UNKNOWN], fail_on=Severity.ERROR, strict=True, allow_unknown=()) == 2
    assert exit_code([CLEAR, UNKNOWN], fail_on=Severity.ERROR, strict=True, allow_unknown=("gs301",)) == 0
    assert exit_code([NOTE], fail_on=Severity.NOTE, strict=False, allow_unknown=()) == 1
