"""Attention implementations against one another: the odd one out found, healthy ones silent, of two none blamed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ghoststep.evidence.equivalence import OtherAttention
from ghoststep.finding import Outcome, Severity
from tests.live import influence_faults as faults
from tests.live.equivalence_models import fact, llama, told, tr, with_attention
from tests.live.influence_models import TinyLM, V, lm_batch, packed_batch, seeded, verdicts


class TestAttention:
    def test_the_odd_one_out_is_a_warning(self) -> None:
        found = told(with_attention(times=4.0), lm_batch())
        assert set(found) == {"GS112"}
        assert "ours, is not what eager and sdpa agree on" in found["GS112"].findings[0].message

    def test_its_healthy_twin_is_clear(self) -> None:
        for model in (with_attention(), llama()):
            said = verdicts(model, lm_batch())["GS112"]
            assert said.outcome is Outcome.CLEAR, said
        assert "ours" in str(verdicts(with_attention(), lm_batch())["GS112"].reason)

    def test_a_mask_read_inverted_is_told_once(self) -> None:
        found = told(with_attention(flip=True), lm_batch())
        assert set(found) == {"GS101"}
        assert "GS112" in {s.code for f in found["GS101"].findings for s in f.symptoms}

    def test_of_two_that_differ_none_is_blamed(self) -> None:
        for name in ("sdpa", "eager"):
            given = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
            config = tr.FalconConfig(**given, bos_token_id=1, eos_token_id=2)
            model: Any = seeded(lambda c=config, n=name: tr.FalconForCausalLM._from_config(c, attn_implementation=n))  # type: ignore[misc]
            said = verdicts(model, lm_batch())["GS112"]
            assert (said.outcome, said.severity) == (Outcome.FOUND, Severity.NOTE)
            assert model.config._attn_implementation == name

    @pytest.mark.parametrize("batch", [lm_batch(side="left"), lm_batch(mask=False), packed_batch()])
    def test_left_pads_no_mask_and_packs_are_clear(self, batch: dict[str, torch.Tensor]) -> None:
        assert verdicts(llama(), batch)["GS112"].outcome is Outcome.CLEAR

    def test_models_without_a_choice_do_not_apply(self) -> None:
        assert verdicts(seeded(TinyLM), lm_batch())["GS112"].outcome is Outcome.NOT_APPLICABLE
        assert verdicts(seeded(faults.Recurrent), lm_batch())["GS112"].outcome is Outcome.NOT_APPLICABLE


def test_switching_is_what_building_it_anew_does() -> None:
    """The slow twin: the same weights in a model that was built with the other implementation."""
    given = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
    models = []
    for name in ("sdpa", "eager"):
        config = tr.FalconConfig(**given, bos_token_id=1, eos_token_id=2)
        models.append(seeded(lambda c=config, n=name: tr.FalconForCausalLM._from_config(c, attn_implementation=n)).eval())  # type: ignore[misc]
    models[1].load_state_dict(models[0].state_dict())
    batch = {k: v[2:3] for k, v in lm_batch().items() if k != "labels"}  # the example with most padding
    real = batch["attention_mask"][0].bool()
    with torch.no_grad():
        one, other = (m(**batch, output_hidden_states=True).hidden_states[-1][0] for m in models)
    moved = ((other - one).norm(dim=-1) / one.norm(dim=-1).median())[real].max()
    reading = fact(OtherAttention, models[0], lm_batch()).reading
    assert reading.change == pytest.approx(float(moved), rel=1e-4)
