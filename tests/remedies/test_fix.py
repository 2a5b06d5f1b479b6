"""`ghoststep fix`: near-zero rows get a value, everything else keeps its bytes, and nothing is ever left half done."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ghoststep
from ghoststep.cli.fix import parse_rows
from ghoststep.cli.main import build_app
from ghoststep.errors import SubjectError, UsageError
from ghoststep.finding import Outcome
from ghoststep.remedies.rows import plan_repair
from ghoststep.remedies.rows_write import MANIFEST
from ghoststep.subjects.checkpoint import open_checkpoint
from tests.checkpoints import build
from tests.remedies.fix_checkpoints import BROKEN, build_mamba2, lost_steps

pytest.importorskip("transformers", reason="transformers is not installed (extra `hf`)")
TABLE = "backbone.embeddings.weight"


def run(*arguments: object) -> tuple[int, str]:
    """Exit code and output of `ghoststep fix`; deliberate errors as the command line shows them."""
    result = CliRunner().invoke(build_app(("fix", "check")), ["fix", *map(str, arguments)])
    said = result.output + (str(result.exception) if result.exception else "")
    return (2 if isinstance(result.exception, ghoststep.GhoststepError) else result.exit_code), said


def digests(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def errors(folder: Path) -> set[str]:
    return {v.code for v in ghoststep.check(folder).verdicts if v.outcome is Outcome.FOUND and v.severity.value == "error"}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mamba2(tmp_path_factory.mktemp("models") / "broken")


def test_errors_before_clean_after_and_no_step_is_lost(broken: Path, tmp_path: Path) -> None:
    before = digests(broken)
    assert errors(broken) == {"GS301", "GS302"}
    assert lost_steps(broken, sorted(BROKEN), steps=20) >= 15  # a plain loop loses nearly every step
    code, said = run(broken, "--out", tmp_path / "new")
    assert code == 0, said
    assert errors(tmp_path / "new") == set()
    assert lost_steps(tmp_path / "new", sorted(BROKEN), steps=100) == 0
    assert digests(broken) == before


def test_only_the_rows_change_and_the_manifest_lists_them(broken: Path, tmp_path: Path) -> None:
    assert run(broken, "--out", tmp_path / "new")[0] == 0
    old, new = load_file(broken / "model.safetensors"), load_file(tmp_path / "new" / "model.safetensors")
    assert old.keys() == new.keys()
    for name in old:
        rows = [i for i in range(len(old[name])) if not torch.equal(old[name][i], new[name][i])]
        assert rows == (sorted(BROKEN) if name == TABLE else [])
    manifest = json.loads((tmp_path / "new" / MANIFEST).read_text())
    assert [r["table_row"] for r in manifest["rows"]] == sorted(BROKEN)
    assert all(abs(r["new_norm"] / manifest["median_norm"] - 0.1) < 0.01 for r in manifest["rows"])
    assert "bit-identical" in manifest["proof"]["logits"]
    assert manifest["proof"]["largest_row_gradient_after"] < 1e3
    kept = {k: v for k, v in digests(broken).items() if k != "model.safetensors"}
    assert {k: v for k, v in digests(tmp_path / "new").items() if k not in ("model.safetensors", MANIFEST)} == kept


def test_the_same_seed_gives_the_same_bytes(broken: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(broken, "--out", tmp_path / name, "--seed", seed, "--no-probe")[0] == 0
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b
    assert a != c


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shards_and_dtype_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    old = build_mamba2(tmp_path / "old", {10: 0.0, 11: 0.0}, dtype=dtype, shard_size="30KB")
    assert len(list(old.glob("*.safetensors"))) > 1
    code, said = run(old, "--out", tmp_path / "new")
    assert code == 0, said
    assert {p.name for p in (tmp_path / "new").iterdir()} == {p.name for p in old.iterdir()} | {MANIFEST}
    assert open_checkpoint(str(tmp_path / "new")).stored().tensors[TABLE].dtype == {torch.bfloat16: "bf16"}.get(dtype, "f16")
    changed = [k for k, v in digests(tmp_path / "new").items() if k != MANIFEST and digests(old)[k] != v]
    assert len(changed) == 1
    assert errors(tmp_path / "new") == set()


def test_nothing_to_fix_writes_nothing(tmp_path: Path) -> None:
    healthy = build_mamba2(tmp_path / "healthy", {})
    code, said = run(healthy, "--out", tmp_path / "new")
    assert (code, said.strip()) == (0, "nothing to fix")
    assert not (tmp_path / "new").exists()


def test_dry_run_lists_and_writes_nothing(broken: Path, tmp_path: Path) -> None:
    code, said = run(broken, "--out", tmp_path / "new", "--dry-run")
    assert code == 0
    assert all(f"row {i} " in said for i in BROKEN)
    assert list(tmp_path.iterdir()) == []


def test_rows_that_are_asked_for_and_no_others(broken: Path, tmp_path: Path) -> None:
    assert run(broken, "--out", tmp_path / "new", "--rows", "10,12", "--no-probe")[0] == 0
    old, new = load_file(broken / "model.safetensors")[TABLE], load_file(tmp_path / "new" / "model.safetensors")[TABLE]
    assert [i for i in range(len(old)) if not torch.equal(old[i], new[i])] == [10, 12]


@pytest.mark.parametrize(("rows", "message"), [("15", "not under"), ("9999", "has rows 0 to"), ("x", "expected numbers")])
def test_rows_that_cannot_be_asked_for_are_refused(broken: Path, tmp_path: Path, rows: str, message: str) -> None:
    code, said = run(broken, "--out", tmp_path / "new", "--rows", rows)
    assert code == 2
    assert message in said
    assert list(tmp_path.iterdir()) == []


def test_rows_that_differ_from_the_base_are_left_alone(broken: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in broken.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    tensors = load_file(base / "model.safetensors")
    tensors[TABLE][11] = 0.5  # the base's row 11 was healthy: somebody changed it since
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    plan = plan_repair(open_checkpoint(str(broken)), base=open_checkpoint(str(base)))
    assert [r.table_row for r in plan.rows] == [10, 12, 40]
    assert (11, "differs from the base") in plan.left


def test_a_tied_table_is_refused(tmp_path: Path) -> None:
    code, said = run(build_mamba2(tmp_path / "tied", tied=True), "--out", tmp_path / "new")
    assert code == 2
    assert "one table" in said
    assert not (tmp_path / "new").exists()


def test_a_model_that_cannot_be_built_is_refused_and_no_probe_compares_bytes(tmp_path: Path) -> None:
    odd = build(tmp_path / "odd", input_rows={20: 1e-30})
    code, said = run(odd, "--out", tmp_path / "new")
    assert code == 2
    assert "cannot be built" in said
    assert "--no-probe" in said
    assert [p.name for p in tmp_path.iterdir()] == ["odd"]
    assert run(odd, "--out", tmp_path / "new", "--no-probe")[0] == 0
    assert "not proved" in json.loads((tmp_path / "new" / MANIFEST).read_text())["proof"]["logits"]


def test_padding_and_rows_without_a_token_stay_zero(tmp_path: Path) -> None:
    odd = build(tmp_path / "odd", rows=80, input_rows={0: 0.0, 20: 0.0, 70: 0.0})
    plan = plan_repair(open_checkpoint(str(odd)))
    assert [r.table_row for r in plan.rows] == [20]
    assert [i for i, _ in plan.left] == [0, 70]


def test_attention_only_models_are_left_alone(tmp_path: Path) -> None:
    odd = build(tmp_path / "odd", wiring="attention", input_rows={20: 1e-9})
    plan = plan_repair(open_checkpoint(str(odd)))
    # word16 can start a document here (no BOS), so it is a danger at the first position only
    assert {r.table_row for r in plan.rows} | {i for i, _ in plan.left} == {20}


@pytest.mark.parametrize("what", ["exists", "inside", "no parent", "no out"])
def test_a_bad_out_is_refused(broken: Path, tmp_path: Path, what: str) -> None:
    before = digests(broken)
    (tmp_path / "there").mkdir()
    places = {"exists": tmp_path / "there", "inside": broken / "new", "no parent": tmp_path / "a" / "b"}
    arguments = ["--out", places[what]] if what in places else []
    assert run(broken, *arguments, "--no-probe")[0] == 2
    assert digests(broken) == before
    assert list((tmp_path / "there").iterdir()) == []


def test_other_formats_and_missing_folders_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    assert run(tmp_path, "--out", tmp_path.parent / "nothing")[0] == 2
    assert run(tmp_path / "absent", "--out", tmp_path.parent / "nothing")[0] == 2


def test_token_strings_are_escaped_in_what_is_printed(tmp_path: Path) -> None:
    odd = build(tmp_path / "odd", specials=["<pad>", "</s>", "\x1b[31mred", "<|x|>"], template="{{ '\x1b[31mred' }}",
                input_rows={2: 0.0})  # fmt: skip
    _, said = run(odd, "--out", tmp_path / "new", "--no-probe")
    assert "\x1b" not in said
    assert "\\x1b[31mred" in said


def test_parse_rows() -> None:
    assert parse_rows(["5,7-9", "1"]) == [1, 5, 7, 8, 9]
    for bad in ("", "-3", "9-7", "1-9999999999", "1.5"):
        with pytest.raises(UsageError):
            parse_rows([bad])


def test_a_table_that_the_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    odd = build(tmp_path / "odd", input_rows={20: 0.0})
    tensors = load_file(odd / "model.safetensors")
    tensors["backbone.embeddings.weight"] = (tensors["backbone.embeddings.weight"] * 2e-7).half()
    save_file(tensors, odd / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SubjectError, match="cannot hold"):
        plan_repair(open_checkpoint(str(odd)), rows=[20])


FORKING = """
import os, pathlib, sys
from ghoststep.remedies.rows import plan_repair
from ghoststep.remedies.rows_write import write_repair
from ghoststep.subjects.checkpoint import open_checkpoint
source = pathlib.Path(sys.argv[1])
repair = plan_repair(open_checkpoint(sys.argv[1]))
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        write_repair(source, pathlib.Path(line.strip()), repair, lambda stage: {})
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def test_killed_at_random_moments_nothing_is_half_written(tmp_path: Path) -> None:
    """SIGKILL at 50 moments between the start of writing and its usual end. The writers are forks of one process, so that each
    starts at once."""
    odd = build(tmp_path / "odd", rows=64, dims=2048, input_rows={20: 0.0})
    for n in range(2):
        (odd / f"extra-{n}.bin").write_bytes(os.urandom(1 << 18))
    before = digests(odd)
    server = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(odd)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    chance, usual, complete = random.Random(5), 0.0, 0
    for attempt in range(51):
        name = tmp_path / f"new-{attempt}"
        server.stdin.write(f"{name}\n")
        server.stdin.flush()
        child, start = int(server.stdout.readline()), time.monotonic()
        if attempt:  # the first one is let finish: it says how long a whole one takes
            time.sleep(chance.uniform(0, usual))
            with contextlib.suppress(ProcessLookupError):  # it was faster this time
                os.kill(child, signal.SIGKILL)
        server.stdout.readline()
        usual = usual or time.monotonic() - start
        if name.exists():
            complete += 1
            new = digests(name)
            assert set(new) == set(before) | {MANIFEST}
            assert {k for k in before if new[k] != before[k]} == {"model.safetensors"}
            json.loads((name / MANIFEST).read_text())
            shutil.rmtree(name)
        assert digests(odd) == before
    server.stdin.close()
    assert server.wait() == 0
    assert 1 <= complete < 40, "the moments missed the writing"
