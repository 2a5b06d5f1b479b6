"""Equivalence on many healthy models, wrapped, encoders and in low precision: silent, and looked at. And its slow twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ghoststep.engine import Case
from ghoststep.evidence.equivalence import Cached, Equivalence, OtherAttention, OtherBatch, OtherMask, Variant
from ghoststep.subjects.setup import make_setup
from tests.live.equivalence_models import SIZES, fact, forgetful, gpt, large, llama, tr
from tests.live.influence_models import PAD, V, lm_batch, registry, seeded
from tests.live.test_influence_zoo import DECODERS, batch

WITH_ATTENTION = ("Gemma3", "RecurrentGemma", "Mixtral", "Llama4, chunks", "GPT-2", "Jamba")


def moved(model: nn.Module, given: dict[str, torch.Tensor], kinds: tuple[type, ...]) -> dict[str, int]:
    """Positions above the tolerance by variant; a fact that is missing fails."""
    found = {}
    for kind in kinds:
        seen = fact(kind, model, given)
        for reading in seen.readings if isinstance(seen, Equivalence) else [seen.reading]:
            found[reading.variant.name] = reading.num_above
    return found


@pytest.mark.parametrize("name", [*WITH_ATTENTION, "Mamba2", "Bloom"])
def test_rounding_of_low_precision_is_not_told(name: str) -> None:
    model = large(seeded(DECODERS[name])).to(torch.bfloat16)
    kinds = (Equivalence, OtherBatch, OtherMask, Cached, *((OtherAttention,) if name in WITH_ATTENTION else ()))
    found = moved(model, batch(), kinds)
    found.pop(Variant.LEFT.name, None)  # a side that nothing uses
    assert set(found.values()) == {0}, found
    assert len(found) == len(kinds)


EVERY = (Equivalence, OtherBatch, OtherMask, OtherAttention, Cached)


def adapted(given: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    made: nn.Module = peft.get_peft_model(given, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return made


def checkpointed(given: Any) -> nn.Module:
    given.gradient_checkpointing_enable()
    made: nn.Module = given.train()
    return made


def compiled(given: nn.Module) -> nn.Module:
    made: nn.Module = torch.compile(given)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("wrap", [adapted, checkpointed, compiled])
@pytest.mark.parametrize("has_mask", [True, False])
def test_wrapped_models_are_looked_at_and_silent(wrap: Any, has_mask: bool) -> None:
    found = moved(wrap(llama(attention_dropout=0.5)), lm_batch(mask=has_mask), EVERY)
    assert set(found.values()) == {0}, found
    assert (Variant.MASK.name in found) is not has_mask


def test_an_encoder_is_looked_at_and_silent() -> None:
    model = seeded(lambda: tr.BertForMaskedLM(tr.BertConfig(**SIZES)))
    found = moved(model, lm_batch(), (Equivalence, OtherBatch, OtherMask, OtherAttention))
    assert found.pop(Variant.LEFT.name) > 0  # learned positions
    assert set(found.values()) == {0}


def test_an_encoder_decoder_does_not_apply() -> None:
    sizes = {"vocab_size": V, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    model = seeded(lambda: tr.T5ForConditionalGeneration(tr.T5Config(**sizes, pad_token_id=0, decoder_start_token_id=0)))
    for kind in EVERY:
        assert "padded apart" in fact(kind, model, lm_batch()).reason


def test_the_cache_reading_is_what_two_calls_by_hand_give() -> None:
    """The slow twin: prompt, then one token a call, with the cache handed on."""
    model: Any = forgetful(gpt()).eval()
    cached = fact(Cached, model, lm_batch())
    ids = lm_batch()["input_ids"][:1]
    with torch.no_grad():
        whole = model(ids, output_hidden_states=True).hidden_states[-1][0]
        out = model(ids[:, : cached.num_prompt], use_cache=True, output_hidden_states=True)
        states = [out.hidden_states[-1][0, -1]]
        for t in range(cached.num_prompt, ids.shape[1]):
            out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True, output_hidden_states=True)
            states.append(out.hidden_states[-1][0, -1])
    difference = (torch.stack(states) - whole[cached.num_prompt - 1 :]).norm(dim=-1) / whole.norm(dim=-1).median()
    assert cached.reading.change == pytest.approx(float(difference.max()), rel=1e-4)


def test_all_of_it_costs_three_passes_of_four_examples_where_nothing_moves() -> None:
    case = Case([make_setup({"model": llama(), "batch": lm_batch(), "pad_token_id": PAD})], registry().instruments)
    cost = sum(getattr(case.fact(kind), "num_forward", 0.0) for kind in EVERY)  # runs are shared
    assert cost <= 3.25
