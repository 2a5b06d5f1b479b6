"""What the registry takes, and what it refuses by name."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from ghoststep import api
from ghoststep.errors import UsageError
from ghoststep.evidence.wiring import TieState
from ghoststep.finding import Basis, Severity
from ghoststep.registry import Answer, Clear, check, load
from tests.checkpoints import build

FAMILIES = {"vocab": "0", "mask": "1", "labels": "2", "rows": "3", "steps": "4", "geometry": "5", "setup": "6", "tool": "9"}


def test_every_code_stands_in_the_folder_of_its_family_and_every_name_in_its_own_file() -> None:
    for c in load(plugins=False).checks:
        *_, folder, module = c.module.split(".")
        assert c.code.startswith("GS" + FAMILIES[folder]), c.module
        assert module == c.name.replace("-", "_")
        assert c.needs
        assert c.flaw.endswith(".")


def test_selection_by_code_prefix_and_name() -> None:
    registry = load(plugins=False)
    assert {c.code[:3] for c in registry.select(["GS3"])} == {"GS3"}
    assert [c.code for c in registry.select(["broken-tie", "gs001"])] == ["GS001", "GS006"]
    assert "GS301" not in [c.code for c in registry.select(ignore=["GS30"])]
    with pytest.raises(UsageError, match="near-zero-input-rows"):
        registry.select(["near-zero-input-row"])


def _int(limit: int) -> Answer:
    """An option that forgot its star."""
    return Clear()


def _bare(tie) -> Answer:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """No annotation."""
    return Clear()


def _no_default(tie: TieState, *, limit: int) -> Answer:
    """An option without a default."""
    return Clear()


@pytest.mark.parametrize(
    ("function", "expected"), [(_int, "annotated int"), (_bare, "no annotation"), (_no_default, "no default")]
)
def test_signatures_that_cannot_work_are_refused(function: object, expected: str) -> None:
    made = check(code="TST901", severity=Severity.NOTE, basis=Basis.PROOF)(function)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=expected):
        _ = made.needs, made.options


def test_a_check_without_a_flaw_or_a_code_is_refused() -> None:
    def silent(tie: TieState) -> Answer:
        return Clear()

    with pytest.raises(TypeError, match="docstring"):
        check(code="TST902", severity=Severity.NOTE, basis=Basis.PROOF)(silent)
    silent.__doc__ = "A flaw."
    with pytest.raises(TypeError, match="three digits"):
        check(code="TST90", severity=Severity.NOTE, basis=Basis.PROOF)(silent)


HEAD = "from ghoststep.registry import check, Clear, Answer\nfrom ghoststep.finding import Basis, Severity\n"
HEAD += "from ghoststep.evidence.wiring import TieState\n"
BROKEN = {
    "a syntax error": ("def (", "SyntaxError"),
    "a code that is taken": (
        HEAD + "@check(code='GS006', severity=Severity.NOTE, basis=Basis.PROOF)\ndef mine(tie: TieState) -> Answer:\n"
        "    '''Mine.'''\n    return Clear()\n",
        "two checks are called GS006",
    ),
    "an annotation that is no fact": (
        HEAD + "@check(code='ACM101', severity=Severity.NOTE, basis=Basis.PROOF)\ndef mine(limit: int) -> Answer:\n"
        "    '''Mine.'''\n    return Clear()\n",
        "annotated int",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_plugin_that_cannot_load_is_told_whatever_is_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    text, expected = BROKEN[fault]
    (tmp_path / "acme_broken_by_us.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_broken_by_us", raising=False)
    entry = importlib.metadata.EntryPoint(name="acme", value="acme_broken_by_us", group="ghoststep.checks")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    registry = load()
    (plugin,) = registry.broken_plugins
    assert expected in plugin.reason
    assert "GS006" in [c.code for c in registry.checks]  # the built-in one stays
    with pytest.raises(UsageError, match="acme failed to load"):
        registry.find("ACM101")
    subjects = api.open_subjects([build(tmp_path / "model")], offline=True)
    report = api.run(subjects, api.CheckSettings(select=("GS006",)), registry)
    assert [v.code for v in report.verdicts if v.findings] == ["GS901"]
    assert report.exit_code == 2
