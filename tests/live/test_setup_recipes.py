"""Every file that `docs/check-a-setup.md` shows runs as it stands there, and its report is clean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ghoststep

PAGE = Path(__file__).resolve().parents[2] / "docs" / "check-a-setup.md"
BLOCKS = dict(
    re.findall(r'^```python title="([a-z_]+\.py)"\n(.*?)^```', PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
)


def test_the_page_has_its_recipes() -> None:
    first = {"train_setup.py", "loop_setup.py", "trainer_setup.py", "peft_setup.py", "dpo_setup.py"}
    assert set(BLOCKS) == {*first, "towers_setup.py"}


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_recipe_runs_and_is_clean(name: str, tmp_path: Path) -> None:
    if name == "peft_setup.py":
        pytest.importorskip("peft")
    path = tmp_path / name
    path.write_text(BLOCKS[name], encoding="utf-8")
    report = ghoststep.check(f"{path}:setup")
    assert report.exit_code == 0
    said = [(v.code, f.message) for v, f in report.findings if v.severity.rank > 0]
    assert said == []
    assert report.summary.clear >= 20
    if name in ("loop_setup.py", "trainer_setup.py"):
        assert report.verdict("GS206").outcome.value == "clear"
    if name == "peft_setup.py":
        assert report.verdict("GS205").outcome.value == "clear"
        assert report.options["training"] == "frozen-embeddings"
        assert report.options["training_measured"] is True
    if name == "towers_setup.py":
        for code in ("GS102", "GS110", "GS507", "GS508", "GS510"):
            assert report.verdict(code).outcome.value == "clear", code
