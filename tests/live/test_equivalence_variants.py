"""The batch around a text, the pack, the attention implementation, the mask, the cache: each fault found, its healthy twin silent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ghoststep.engine import Case
from ghoststep.evidence.equivalence import Cached, Equivalence, OtherAttention, OtherBatch, OtherMask, Packed
from ghoststep.finding import Outcome, Severity
from ghoststep.subjects.setup import make_setup
from tests.live import influence_faults as faults
from tests.live.equivalence_models import (
    GPT,
    SIZES,
    fact,
    forgetful,
    gpt,
    large,
    llama,
    shifted_with_mask,
    told,
    tr,
    with_attention,
)
from tests.live.influence_models import PAD, D, T, TinyLM, bad, lm_batch, packed_batch, registry, right, seeded, verdicts


class ByPlace(nn.Module):
    """Adds a vector that belongs to the place in the batch."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.table, self.strength = nn.Parameter(torch.randn(8, D)), strength

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.strength * self.table[: len(x), None]


class TestOtherBatch:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_place_in_the_batch_that_matters_is_an_error(self, dtype: torch.dtype) -> None:
        model = seeded(lambda: TinyLM(absolute=False, mix=ByPlace(0.3)).to(dtype))
        found = told(model, lm_batch())
        assert set(found) == {"GS105"}
        assert found["GS105"].severity is Severity.ERROR
        assert "where it stands in the batch" in found["GS105"].findings[0].message

    def test_a_little_of_it_is_a_warning(self) -> None:
        found = told(seeded(lambda: TinyLM(absolute=False, mix=ByPlace(3e-4))), lm_batch())
        assert found["GS105"].severity is Severity.WARNING

    def test_rounding_is_not(self) -> None:
        found = verdicts(seeded(lambda: TinyLM(absolute=False, mix=ByPlace(1e-7))), lm_batch())
        assert found["GS105"].outcome is Outcome.CLEAR

    def test_routing_by_capacity_is_a_note(self) -> None:
        for per_example in (True, False):
            layer = faults.Capacity(last_first=False, per_example=per_example)
            found = verdicts(seeded(lambda layer=layer: TinyLM(absolute=False, mix=layer)), lm_batch())  # type: ignore[misc]
            assert found["GS105"].severity is Severity.NOTE or found["GS105"].outcome is Outcome.CLEAR

    def test_it_costs_six_single_examples_at_most(self) -> None:
        assert fact(OtherBatch, seeded(TinyLM), lm_batch()).num_forward <= 6 / 4


def numbered(ids: torch.Tensor, keep: torch.Tensor | None, at: torch.Tensor | None) -> torch.Tensor:
    """A mask that numbers the documents, read as announced."""
    assert keep is not None
    return right(ids, None, at) & (keep[:, :, None] == keep[:, None, :])[:, None]


def numbered_batch() -> dict[str, torch.Tensor]:
    batch = packed_batch()
    documents = 1 + (torch.arange(T) >= 6).long().repeat(3, 1)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"], "attention_mask": documents}


class TestPacked:
    def test_positions_that_go_on_are_a_warning(self) -> None:
        found = told(seeded(lambda: TinyLM(numbered)), numbered_batch())
        assert set(found) == {"GS115"}
        assert found["GS115"].severity is Severity.WARNING
        assert found["GS115"].findings[0].where.document == 1

    def test_restarting_or_relative_positions_are_proved_isolated(self) -> None:
        for model, batch in (
            (TinyLM(faults.packs), packed_batch()),
            (TinyLM(numbered, absolute=False), numbered_batch()),
            (llama(use_cache=False), packed_batch()),
        ):
            reading = fact(Packed, model.train(), batch).reading
            assert reading.change < 1e-6
            assert reading.num_positions == T - 6
            assert verdicts(model, batch)["GS115"].outcome is Outcome.CLEAR

    def test_a_leak_is_told_once(self) -> None:
        found = told(seeded(lambda: TinyLM(faults.causal_only)), packed_batch(ones=True))
        assert set(found) == {"GS104"}
        assert "GS115" in {s.code for f in found["GS104"].findings for s in f.symptoms}

    def test_attention_chunks_counted_from_the_pack_are_a_note(self) -> None:
        def chunks(ids: torch.Tensor, keep: torch.Tensor | None, at: torch.Tensor | None) -> torch.Tensor:
            return numbered(ids, keep, at) & faults.chunks(ids, None, at)

        found = verdicts(seeded(lambda: TinyLM(chunks, absolute=False)), numbered_batch())["GS115"]
        assert found.outcome is Outcome.FOUND
        assert found.severity is Severity.NOTE

    def test_a_flattened_pack_is_cut_by_its_lengths(self) -> None:
        batch = packed_batch()
        flat = {k: v.reshape(1, -1) for k, v in batch.items()}
        ends = torch.tensor([0, 6, 16, 22, 32, 38, 48])
        flat |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        assert fact(Packed, llama(use_cache=False), flat).reading.change < 1e-6

    def test_batches_without_documents_do_not_apply(self) -> None:
        assert verdicts(seeded(TinyLM), lm_batch())["GS115"].outcome is Outcome.NOT_APPLICABLE


class TestMask:
    @pytest.mark.parametrize(("intent", "severity"), [("rl", Severity.WARNING), ("causal", Severity.NOTE)])
    def test_training_without_one_is_a_warning_where_training_generates(self, intent: str, severity: Severity) -> None:
        said = verdicts(shifted_with_mask(gpt()), lm_batch(mask=False), intent=intent)["GS114"]
        assert (said.outcome, said.severity) == (Outcome.FOUND, severity)
        assert "which passes an attention mask, and the batch passes none" in said.findings[0].message

    def test_training_with_one_is_a_note(self) -> None:
        said = verdicts(shifted_with_mask(gpt()), lm_batch())["GS114"]
        assert (said.outcome, said.severity) == (Outcome.FOUND, Severity.NOTE)

    def test_a_mask_that_drops_the_causal_part_is_told_once(self) -> None:
        found = told(seeded(lambda: TinyLM(faults.causal_only_without_padding_mask, absolute=False)), lm_batch())
        assert set(found) == {"GS101"}
        assert "GS114" in {s.code for f in found["GS101"].findings for s in f.symptoms}

    def test_healthy_models_are_clear(self) -> None:
        for model in (gpt(), llama(), seeded(TinyLM)):
            assert verdicts(model, lm_batch())["GS114"].outcome is Outcome.CLEAR
        assert verdicts(gpt(), lm_batch(mask=False))["GS114"].outcome is Outcome.CLEAR

    def test_where_a_mask_means_nothing_it_does_not_apply(self) -> None:
        assert verdicts(seeded(TinyLM), lm_batch(mask=False))["GS114"].outcome is Outcome.NOT_APPLICABLE
        assert verdicts(seeded(lambda: TinyLM(faults.packs)), packed_batch())["GS114"].outcome is Outcome.NOT_APPLICABLE


class TestCache:
    @pytest.mark.parametrize("make", [llama, gpt])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_positions_that_forget_the_cache_would_break_in_generation(self, make: Any, dtype: torch.dtype) -> None:
        model = forgetful(large(make()).to(dtype))
        said = verdicts(model, lm_batch())
        assert (said["GS113"].outcome, said["GS113"].severity) == (Outcome.FOUND, Severity.NOTE)
        assert "would break in generation: " in said["GS113"].findings[0].message
        assert "whose input is one token" in said["GS113"].findings[0].message
        assert bad(said) == set()
        assert bad(verdicts(model, lm_batch(), intent="rl")) == {"GS113"}

    def test_positions_that_generation_counts_otherwise_show_at_the_prompt(self) -> None:
        config = tr.CamembertConfig(**{**SIZES, "num_key_value_heads": None}, is_decoder=True)
        said = verdicts(seeded(lambda: tr.CamembertForCausalLM(config)), lm_batch())["GS113"]
        assert said.severity is Severity.NOTE
        assert "before anything comes from the cache" in said.findings[0].message

    def test_a_cache_that_generation_does_not_use_says_so(self) -> None:
        model: Any = forgetful(llama())
        model.generation_config.use_cache = False
        assert "not its default" in verdicts(model, lm_batch())["GS113"].findings[0].message

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_healthy_models_are_clear(self, side: str) -> None:
        for model in (llama(), gpt()):
            assert verdicts(model, lm_batch(side=side))["GS113"].outcome is Outcome.CLEAR
        cached = fact(Cached, llama(), lm_batch(side=side))
        assert (cached.num_prompt, cached.reading.num_positions) == (T - 3, 4)
        assert 0 < cached.reading.change < 1e-6  # it ran, and another way

    def test_models_without_one_do_not_apply(self) -> None:
        assert verdicts(seeded(TinyLM), lm_batch())["GS113"].outcome is Outcome.NOT_APPLICABLE
        old = seeded(lambda: tr.OpenAIGPTLMHeadModel(tr.OpenAIGPTConfig(**GPT)))
        said = verdicts(old, lm_batch())["GS113"]
        assert said.outcome is Outcome.NOT_APPLICABLE
        assert "no cache" in str(said.reason)


KINDS = (Equivalence, OtherBatch, Packed, OtherAttention, OtherMask, Cached)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [lambda: forgetful(gpt()), lambda: with_attention(times=4.0), lambda: TinyLM(mix=ByPlace(0.3))]
)
def test_nothing_changes(make: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    model = make().to(dtype).train()
    setup = make_setup({"model": model, "batch": lm_batch(side="left"), "pad_token_id": PAD})
    case = Case([setup], registry().instruments)
    from ghoststep.instruments.live.base_probe import BaseProbe

    case.fact(BaseProbe)
    before = [(n, p, p.detach().clone(), p.dtype) for n, p in model.named_parameters()]
    buffers = [(n, b, b.clone()) for n, b in model.named_buffers()]
    config = dict(vars(model.config)) if hasattr(model, "config") else {}
    random = torch.get_rng_state()
    moved = [case.fact(kind) for kind in KINDS]
    assert sum(getattr(m, "num_forward", 0.0) > 0 for m in moved) >= 2
    for (name, p, value, kept), (now, q) in zip(before, model.named_parameters(), strict=True):
        assert (name, kept) == (now, q.dtype)
        assert p is q
        assert torch.equal(value, q)
        assert q.requires_grad
        assert q.grad is None
    for (name, b, value), (now, c) in zip(buffers, model.named_buffers(), strict=True):
        assert name == now
        assert b is c
        assert torch.equal(value, c)
    assert model.training
    assert torch.equal(random, torch.get_rng_state())
    assert config == (dict(vars(model.config)) if hasattr(model, "config") else {})


def test_none_of_it_runs_fast() -> None:
    setup = make_setup({"model": llama(), "batch": lm_batch(), "pad_token_id": PAD}, fast=True)
    case = Case([setup], registry().instruments)
    for kind in KINDS:
        assert "--fast" in getattr(case.fact(kind), "reason", "")


@pytest.mark.parametrize("mean_of_means", [True, False])
def test_micro_batches_against_one_joined_batch(mean_of_means: bool) -> None:
    """What `uneven-token-weight` says of a window is what its gradient does: it is the joined batch's, or it is not."""
    whole = lm_batch(examples=4)
    whole["labels"][2:, 4:] = -100
    parts = [{k: v[i : i + 2] for k, v in whole.items()} for i in (0, 2)]
    total = int((whole["labels"][:, 1:] >= 0).sum())

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        mean: torch.Tensor = model(**batch).loss
        tokens = int((batch["labels"][:, 1:] >= 0).sum())
        return mean / 2 if mean_of_means else mean * tokens / total

    def gradient(model: nn.Module, losses: list[torch.Tensor]) -> torch.Tensor:
        model.zero_grad()
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])

    model = seeded(TinyLM)
    accumulated = gradient(model, [loss_fn(model, part) for part in parts])
    joined = gradient(model, [model(**whole).loss])
    apart = float((accumulated - joined).norm() / joined.norm())
    model.zero_grad(set_to_none=True)
    setup = make_setup({"model": model, "batches": parts, "loss_fn": loss_fn, "accumulation_steps": 2, "pad_token_id": PAD})
    from ghoststep.engine import ask

    said = ask(Case([setup], registry().instruments), registry().find("GS206"))
    assert (apart > 0.05) == mean_of_means
    assert apart < 1e-5 or mean_of_means
    assert (said.outcome is Outcome.FOUND) == mean_of_means, said


def test_nothing_is_said_of_healthy_models() -> None:
    for batch in (lm_batch(), lm_batch(mask=False), packed_batch()):
        assert bad(verdicts(llama(use_cache=False), batch)) == set()
