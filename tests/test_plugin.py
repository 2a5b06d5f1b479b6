"""Checks of another package: found through the entry point, run like our own, and never silently absent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ghoststep.engine import Case, ask
from ghoststep.evidence.tokenizer import Vocabulary
from ghoststep.finding import Outcome
from ghoststep.registry import load

EXAMPLE = Path(__file__).parent / "plugin" / "src"


def pretend_installed(monkeypatch: pytest.MonkeyPatch, folder: Path, *, module: str, source: Path | None = None) -> None:
    """Put a distribution's metadata with our entry point on the import path, as pip would."""
    info = folder / "acme_checks-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-checks\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[ghoststep.checks]\nacme = {module}\n")
    monkeypatch.syspath_prepend(str(folder))
    if source is not None:
        monkeypatch.syspath_prepend(str(source))


def test_the_entry_point_alone_brings_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "ACME101" not in [c.code for c in load(with_instruments=False).checks]
    pretend_installed(monkeypatch, tmp_path, module="acme_checks", source=EXAMPLE)
    registry = load(with_instruments=False)
    check = registry.find("pad-token-is-bos")
    assert check.code == "ACME101"
    assert registry.checks[-1] is check, "other packages' checks stand behind our own"
    assert registry.versions == {"acme-checks": "0.1.0"}
    assert not registry.broken_plugins
    vocabulary = Vocabulary(file="tokenizer.json", kind="bpe", num_tokens=9, max_id=8, special_ids={"bos": 1, "pad": 1})
    assert ask(Case([vocabulary]), check).outcome is Outcome.FOUND
    assert ask(Case([]), check).outcome is Outcome.UNKNOWN, "without a tokenizer it cannot look, and says so by itself"


def test_a_package_that_fails_to_import_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "acme_broken.py").write_text("raise RuntimeError('no licence key')\n")
    pretend_installed(monkeypatch, tmp_path, module="acme_broken")
    registry = load(with_instruments=False)
    assert [p.name for p in registry.broken_plugins] == ["acme"]
    assert "no licence key" in registry.broken_plugins[0].reason
    sys.modules.pop("acme_broken", None)


def test_plugins_can_be_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_installed(monkeypatch, tmp_path, module="acme_checks", source=EXAMPLE)
    assert "ACME101" not in [c.code for c in load(with_instruments=False, plugins=False).checks]
