"""Every folder of the gallery fails silently (the harm is measured), is found by its check, and is cured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from ghoststep.cli.main import main
from ghoststep.errors import SubjectError, UsageError
from ghoststep.finding import Outcome
from ghoststep.gallery_index import SECTIONS, Exhibit, exhibits, find_exhibit, load_exhibit, show

EVERY = exhibits()
MAX_LINES = 120
FAMILIES_WITH_ALL = ("GS0", "GS1", "GS2", "GS4", "GS6")
NOT_SILENT = {"GS004", "GS011"}  # speed only; refused by whoever reads it
WAITING: dict[str, str] = {}
"""Exhibits that show a defect of ghoststep itself: taken out as soon as it is mended (then the test fails)."""


def _each() -> list[ParameterSet]:
    marks = {n: (pytest.mark.xfail(reason=why, strict=True),) for n, why in WAITING.items()}
    return [pytest.param(e, id=e.name, marks=marks.get(e.name, ())) for e in EVERY]


@pytest.mark.parametrize("exhibit", _each())
def test_it_harms_is_found_and_is_cured(exhibit: Exhibit) -> None:
    shown = show(exhibit)
    assert shown.is_harmful, f"harm {shown.harm_broken:.4g} broken, {shown.harm_cured:.4g} cured; harmless: {shown.harmless}"
    assert shown.is_found, [f"{v.code} {v.name} {f.message}" for v in shown.broken.verdicts for f in v.findings]
    assert shown.beside == (), "one cause, one error"
    assert shown.is_cured, [*shown.left, *(f"{v.outcome} {v.reason}" for v in shown.cured.verdicts if v.code == exhibit.code)]
    for report in (shown.broken, shown.cured):
        assert [v.reason for v in report.verdicts if v.outcome is Outcome.BROKEN] == []


@pytest.mark.parametrize("exhibit", EVERY, ids=[e.name for e in EVERY])
def test_its_page_is_whole_and_it_is_short(exhibit: Exhibit) -> None:
    assert exhibit.code.startswith("GS"), "the folder is named after a check"
    assert tuple(exhibit.sections) == SECTIONS
    assert all(exhibit.sections.values())
    assert exhibit.title.endswith(".")
    assert exhibit.path.read_text(encoding="utf-8").count("\n") <= MAX_LINES
    assert [p.name for p in exhibit.path.parent.iterdir() if p.name != "__pycache__"] == ["failure.py"]


def test_no_failure_of_these_families_is_missing() -> None:
    from ghoststep.registry import load

    wanted = {c.code for c in load(with_instruments=False).checks if c.code.startswith(FAMILIES_WITH_ALL)} - NOT_SILENT
    assert wanted - {e.code for e in EVERY} == set()


def test_an_exhibit_is_found_by_name_and_code() -> None:
    assert find_exhibit("GS101") == find_exhibit("visible-future")
    with pytest.raises(UsageError, match="visible-future"):
        find_exhibit("visible-futur")


def test_a_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SubjectError, match="needs transformers"):
        load_exhibit(find_exhibit("unshifted-labels"))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["ghoststep", "gallery", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_the_command_lists_and_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch) == 0
    listed = capsys.readouterr().out
    assert all(e.name in listed for e in EVERY)
    assert run(monkeypatch, "visible-future") == 0
    shown = capsys.readouterr().out
    assert "error GS101 visible-future" in shown
    assert "who sees whom" in shown
    assert "X" in shown
    assert max(map(len, shown.splitlines()[:-1])) <= 120
    picture = tmp_path / "labels.svg"
    assert run(monkeypatch, "padding-in-loss", "--svg", str(picture)) == 0
    assert picture.read_text(encoding="utf-8").startswith("<svg ")
    assert run(monkeypatch, "broken-tie", "--svg", str(picture)) == 2
    assert "what the loss trains on" in capsys.readouterr().out
    assert run(monkeypatch, "nothing-like-it") == 2


def test_listing_imports_no_torch() -> None:
    code = "import sys; from ghoststep.gallery_index import exhibits; exhibits(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
