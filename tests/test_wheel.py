"""The wheel, in a clean environment outside the repository: what a user gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run in `cwd` without this interpreter's variables; fails with the output when the exit code is another."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=540
    )
    assert expect is None or done.returncode == expect, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source folder as it is, with the build tools of this environment: no network."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_it_holds_types_licence_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "ghoststep/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    strangers = [n for n in names if not n.startswith("ghoststep/") and ".dist-info/" not in n]
    assert strangers == []
    on_disk = {
        p.relative_to(ROOT / "src").as_posix()
        for p in (ROOT / "src").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert on_disk - set(names) == set(), "every file of the package is in the wheel (templates and schemas too)"


def a_checkpoint(folder: Path) -> Path:
    """A small untied attention-only checkpoint; the input table row of the ordinary word "word5" is exactly zero."""
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    rng = np.random.default_rng(0)
    table, head = (rng.normal(size=(64, 16)).astype(np.float32) for _ in range(2))
    table[5] = 0
    folder.mkdir()
    layer = {f"model.layers.0.self_attn.{n}_proj.weight": rng.normal(size=(16, 16)).astype(np.float32) for n in "qkvo"}
    save_file({"model.embed_tokens.weight": table, "lm_head.weight": head, **layer}, folder / "model.safetensors")
    config = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({f"word{i}": i for i in range(64)}, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.network
def test_it_runs_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", ROOT / "constraints.txt")
    installed = run(*pip, wheel, cwd=tmp_path, expect=None)
    if installed.returncode != 0:
        last = (installed.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"the wheel's dependencies could not be installed (offline?): {last}")
    where = run(python, "-c", "import ghoststep; print(ghoststep.__file__)", cwd=tmp_path).stdout
    assert str(tmp_path) in where, "the wheel is tested, not the source folder"
    ghoststep = python.with_name("ghoststep")
    # The extras are absent here: whatever needs one has to say so, not fall over.
    done = run(ghoststep, "check", a_checkpoint(tmp_path / "model"), "--format", "json", cwd=tmp_path, expect=None)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    broken = [v for v in report["verdicts"] if v["outcome"] == "broken"]
    assert broken == []
    (zero,) = (v for v in report["verdicts"] if v["name"] == "zero-input-rows")
    assert [f["where"]["token_id"] for f in zero["findings"]] == [5], zero
    # Somebody else's check: one package more, and it is there.
    run(*pip, "hatchling", "editables", cwd=tmp_path)
    run(*pip, "--no-deps", "--no-build-isolation", ROOT / "tests" / "plugin", cwd=tmp_path)
    assert "ACME101" in run(ghoststep, "checks", cwd=tmp_path).stdout
