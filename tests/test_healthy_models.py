"""Real model classes, saved by transformers as users save them, are healthy: no error, no warning, nothing broken.

And the same classes with one decayed row of a real token are found, at the severity that their wiring asks for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ghoststep
from ghoststep.finding import Outcome, Severity
from tests.checkpoints import SPECIALS, TEMPLATE, WORDS, write_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `hf`)")

ROWS, DIMS = 64, 32
SMALL: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": DIMS,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
GPT2: dict[str, Any] = {"vocab_size": ROWS, "n_embd": DIMS, "n_layer": 2, "n_head": 4, "n_positions": 32}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
MAMBA: dict[str, Any] = {"vocab_size": ROWS, "hidden_size": DIMS, "num_hidden_layers": 2, "state_size": 8}
MAMBA |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
MAMBA2: dict[str, Any] = {**MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16}
BERT: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"} | {"max_position_embeddings": 32}
T5: dict[str, Any] = {"vocab_size": ROWS, "d_model": DIMS, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
T5 |= {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}

# class, config values, severity of a word's row at 1e-12 (no BOS: a word may start a packed document)
MODELS: list[tuple[str, dict[str, Any], Severity | None]] = [
    ("LlamaForCausalLM", {**SMALL, "tie_word_embeddings": False}, Severity.ERROR),
    ("LlamaForCausalLM", {**SMALL, "tie_word_embeddings": True}, Severity.ERROR),
    ("Qwen2ForCausalLM", {**SMALL, "tie_word_embeddings": True}, Severity.ERROR),
    ("GPT2LMHeadModel", GPT2, Severity.NOTE),
    ("MambaForCausalLM", {**MAMBA, "tie_word_embeddings": True}, Severity.ERROR),
    ("Mamba2ForCausalLM", {**MAMBA2, "tie_word_embeddings": False}, Severity.ERROR),
    ("BertForMaskedLM", BERT, Severity.NOTE),
    ("BertModel", BERT, Severity.NOTE),
    ("LlamaForSequenceClassification", {**SMALL, "num_labels": 2}, Severity.ERROR),
    ("T5ForConditionalGeneration", T5, None),
]


def save(folder: Path, name: str, values: dict[str, Any], decayed: float | None = None) -> Path:
    import torch

    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**values))
    if decayed is not None:
        with torch.no_grad():
            table = model.get_input_embeddings().weight
            table[10] *= decayed / table[10].norm()
    model.save_pretrained(folder)
    write_tokenizer(folder, SPECIALS, TEMPLATE)
    return folder


@pytest.mark.parametrize(("name", "values", "severity"), MODELS, ids=lambda v: v if isinstance(v, str) else "")
def test_healthy_is_silent_and_one_decayed_row_is_found(
    tmp_path: Path, name: str, values: dict[str, Any], severity: Severity | None
) -> None:
    report = ghoststep.check(save(tmp_path / "healthy", name, values))
    loud = [v for v in report.verdicts if v.outcome is Outcome.BROKEN or (v.findings and v.severity is not Severity.NOTE)]
    assert loud == []
    assert [v.code for v in report.verdicts if v.findings] in ([], ["GS306"])
    assert report.verdict("GS301").outcome is Outcome.CLEAR

    found = ghoststep.check(save(tmp_path / "decayed", name, values, decayed=1e-12))
    verdict = found.verdict("GS301")
    assert verdict.outcome is Outcome.FOUND
    (finding,) = verdict.findings
    assert finding.where.token == WORDS[10 - len(SPECIALS)]
    assert severity is None or finding.severity is severity
    assert [v.code for v in found.verdicts if v.findings and v.severity is not Severity.NOTE] in ([], ["GS301"])
