"""Steps lost to one row in real model classes, each found at its step with token, table row, norm and position.

Smallest failing sizes: Mamba-2 with 8 layers in the middle of a text, Llama with 24 layers at the first position and at the first
position of a packed document.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ghoststep
from ghoststep.finding import Outcome, Severity
from tests.small_models import mamba2, with_dead_row

TOKEN, BAD = 17, (5, 9)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=128, num_hidden_layers=24, num_attention_heads=4, num_key_value_heads=4,
        tie_word_embeddings=False, use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def packed(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two documents of eight tokens in each example: an additive block-diagonal causal mask, positions that restart."""
    document_T = torch.arange(16) // 8
    seen_TT = (document_T[:, None] == document_T) & torch.ones(16, 16, dtype=torch.bool).tril()
    mask = torch.where(seen_TT, 0.0, torch.finfo(torch.float32).min).expand(len(ids), 1, 16, 16)
    return {"attention_mask": mask, "position_ids": (torch.arange(16) % 8).expand(len(ids), 16)}


CASES: dict[str, tuple[Any, float, int, str]] = {
    "mamba": (lambda: mamba2(8), 1e-30, 8, "zeroed-step"),
    "mamba, finite": (lambda: mamba2(8), 1e-12, 8, "crushed-step"),
    "llama, first": (llama, 1e-30, 0, "zeroed-step"),
    "llama, packed": (llama, 1e-30, 8, "zeroed-step"),
    "llama, middle": (llama, 1e-30, 8, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_found_at_the_step(case: str) -> None:
    build, norm, position, name = CASES[case]
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        row = model.get_input_embeddings().weight[TOKEN]
        row.copy_(torch.nn.functional.normalize(torch.randn_like(row), dim=0) * norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    with ghoststep.watch(model, optimizer) as w:
        for step in range(1, 13):
            ids = torch.randint(20, 160, (2, 16), generator=generator)
            if step in BAD:
                ids[1, position] = TOKEN
            more = packed(ids) if "packed" in case else {}
            model(input_ids=ids, labels=ids, **more).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    found = [v for v in w.report().verdicts if v.outcome is Outcome.FOUND]
    assert [v.name for v in found] == ([name] if name else [])
    if name:
        (finding,) = found[0].findings
        where = finding.where
        assert (where.step, where.token_id, where.table_row, where.example, where.position) == (
            BAD[0],
            TOKEN,
            TOKEN,
            1,
            position,
        )
        lost = w.flusher.window[BAD[0] - 1]
        assert lost.rows[0].row_norm_before == pytest.approx(norm, rel=0.01)
        assert f"norm {norm:.3g}"[:8] in finding.message


def test_a_step_that_a_policy_skipped_is_told_as_skipped() -> None:
    torch.manual_seed(0)
    model = with_dead_row(mamba2(8), TOKEN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ghoststep.watch(model, optimizer, policy={"GS401": "skip-step"}, strict=True) as w:
        for step in range(1, 11):
            ids = torch.randint(20, 160, (2, 16))
            if step in BAD:
                ids[1, 8] = TOKEN
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    (verdict,) = [v for v in w.report().verdicts if v.outcome is Outcome.FOUND]
    assert (verdict.name, verdict.severity) == ("zeroed-step", Severity.WARNING)
    assert "ghoststep skipped 2 of them" in verdict.findings[0].message
