"""Every folder of the gallery fails silently (the harm is measured), is found by its check, and is cured."""

from __future__ import annotations

import pytest

from ghoststep.errors import UsageError
from ghoststep.gallery_index import SECTIONS, Exhibit, exhibits, find_exhibit, show

EVERY = exhibits()
MAX_LINES = 120


@pytest.mark.parametrize("exhibit", EVERY, ids=[e.name for e in EVERY])
def test_it_harms_is_found_and_is_cured(exhibit: Exhibit) -> None:
    shown = show(exhibit)
    assert shown.is_harmful, f"harm {shown.harm_broken:.4g} broken, {shown.harm_cured:.4g} cured; harmless: {shown.harmless}"
    assert shown.is_found, [f"{v.code} {v.name} {f.message}" for v in shown.broken.verdicts for f in v.findings]
    assert shown.beside == (), "one cause, one error"
    assert shown.is_cured, [*shown.left, *(f"{v.outcome} {v.reason}" for v in shown.cured.verdicts if v.code == exhibit.code)]


@pytest.mark.parametrize("exhibit", EVERY, ids=[e.name for e in EVERY])
def test_its_page_is_whole_and_it_is_short(exhibit: Exhibit) -> None:
    assert exhibit.code.startswith("GS"), "the folder is named after a check"
    assert tuple(exhibit.sections) == SECTIONS
    assert all(exhibit.sections.values())
    assert exhibit.title.endswith(".")
    assert exhibit.path.read_text(encoding="utf-8").count("\n") <= MAX_LINES
    assert [p.name for p in exhibit.path.parent.iterdir() if p.name != "__pycache__"] == ["failure.py"]


def test_an_exhibit_is_found_by_name_and_code() -> None:
    assert find_exhibit("GS101") == find_exhibit("visible-future")
    with pytest.raises(UsageError, match="visible-future"):
        find_exhibit("visible-futur")
