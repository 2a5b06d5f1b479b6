"""The documentation says what is: examples of configuration are valid, links lead somewhere, named checks exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ghoststep.config import check_options, load_config
from ghoststep.registry import load

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TOML = re.compile(r"^```toml\n(.*?)^```", re.DOTALL | re.MULTILINE)
WITH_CONFIG = [
    page for page in PAGES if any("[tool.ghoststep" in block for block in TOML.findall(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("page", WITH_CONFIG, ids=lambda page: page.name)
def test_configuration_examples_are_valid(page: Path, tmp_path: Path) -> None:
    blocks = [block for block in TOML.findall(page.read_text(encoding="utf-8")) if "[tool.ghoststep" in block]
    path = tmp_path / "pyproject.toml"
    path.write_text("\n".join(blocks), encoding="utf-8")
    config = load_config(path)
    registry = load(with_instruments=False, plugins=False)
    check_options(config, registry)
    registry.select(config.select, config.ignore)
    for code in (*config.allow_unknown, *(acceptance.code for acceptance in config.accept)):
        registry.find(code)


def test_there_are_such_examples() -> None:
    assert {page.name for page in WITH_CONFIG} >= {"README.md", "configuration.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    """mkdocs checks links between its pages; this also sees README and CONTRIBUTING. Generated pages are left to mkdocs."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    local = [t for t in targets if "://" not in t and not t.startswith("checks/")]
    assert [t for t in local if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_codes_that_are_named_exist(page: Path) -> None:
    known = {check.code for check in load(with_instruments=False, plugins=False).checks}
    named = set(re.findall(r"\bGS\d{3}\b", page.read_text(encoding="utf-8")))
    assert named - known == set()


def test_examples_are_included_from_files_that_are_tested() -> None:
    """A snippet line that a formatter broke would show itself instead of the code."""
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("--8")]
    assert len(lines) >= 3
    for line in lines:
        found = re.fullmatch(r'--8<-- "(.+)"', line)
        assert found, line
        assert (ROOT / found[1]).is_file(), line
