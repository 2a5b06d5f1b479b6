"""A setup that names its `checkpoint_dir` is judged by both: the live model, and what its files show beyond it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ghoststep
from tests.checkpoints import build

transformers = pytest.importorskip("transformers")


def setup(**more: Any) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(2, 64, (4, 16))
    return {"model": model, "batch": {"input_ids": ids, "labels": ids.clone()}, **more}


def found(report: ghoststep.Report) -> list[str]:
    return [v.code for v in report.verdicts if v.findings]


def test_files_that_show_more_are_heard(tmp_path: Path) -> None:
    damaged = build(tmp_path / "saved", wiring="attention", input_rows={10: 0.0})
    assert found(ghoststep.check(setup())) == []
    report = ghoststep.check(setup(checkpoint_dir=str(damaged)), select=["GS006", "GS008", "GS302", "GS308"])
    assert report.verdict("GS308").outcome.value == "clear"  # only the files have a tokenizer
    assert [f.where.token for f in report.verdict("GS302").findings] == ["word6"]


def test_files_without_a_tokenizer_take_nothing_away(tmp_path: Path) -> None:
    bare = build(tmp_path / "bare", wiring="attention", tokenizer=False)
    alone = ghoststep.check(setup())
    both = ghoststep.check(setup(checkpoint_dir=str(bare)))
    outcomes = {v.code: v.outcome for v in alone.verdicts}
    worse = {v.code for v in both.verdicts if v.outcome.value == "unknown" and outcomes[v.code].value != "unknown"}
    assert worse == set()
