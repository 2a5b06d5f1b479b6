"""What the package promises as a package: a version, types, and imports that cost nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ghoststep

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "gguf", "huggingface_hub", "safetensors")


def heavy_after(code: str) -> list[str]:
    """Which heavy packages a fresh interpreter has loaded after running `code`."""
    code += f"\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules], sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_the_helper_sees_a_heavy_import() -> None:
    assert heavy_after("import numpy") == ["numpy"]


@pytest.mark.parametrize(
    "code",
    [
        "import ghoststep",
        "import ghoststep.registry",
        "import ghoststep; ghoststep.Finding; ghoststep.check",
        "from ghoststep.registry import load; load(with_instruments=False)",
        "from ghoststep.registry import load; load(with_instruments=True)",
        "import ghoststep.cli.main",
    ],
)
def test_imports_load_nothing_heavy(code: str) -> None:
    assert heavy_after(code) == []


def test_every_module_imports_without_heavy_packages() -> None:
    """But the integrations, each of which is a subclass of its library's callback."""
    code = (
        "import importlib, pkgutil, ghoststep\n"
        "found = pkgutil.walk_packages(ghoststep.__path__, 'ghoststep.', onerror=print)\n"
        "for name in [m.name for m in found if not m.name.startswith('ghoststep.integrations.')]: importlib.import_module(name)"
    )
    assert heavy_after(code) == []


def test_every_promised_name_is_there() -> None:
    missing = [name for name in ghoststep.__all__ if not hasattr(ghoststep, name)]
    assert missing == []
    with pytest.raises(AttributeError, match="no attribute 'chekc'"):
        _ = ghoststep.chekc


def test_version_is_one_and_in_the_changelog() -> None:
    from importlib.metadata import version

    assert re.fullmatch(r"\d+\.\d+\.\d+([.a-z]+\d+)?", ghoststep.__version__)
    assert version("ghoststep") == ghoststep.__version__
    assert f"version: {ghoststep.__version__}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_dependency_is_pinned_for_the_scripts() -> None:
    """A dependency without a pin would make two runs of scripts/test two different environments."""
    from importlib.metadata import requires

    pins = re.findall(r"^([a-z0-9-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    wanted = {
        re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;(]", need, maxsplit=1)[0]).lower() for need in requires("ghoststep") or []
    }
    assert wanted - set(pins) == set()


def test_typed() -> None:
    assert (Path(ghoststep.__file__).parent / "py.typed").is_file()
