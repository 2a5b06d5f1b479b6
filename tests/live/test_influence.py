"""Who sees whom, on a model family of our own: every fault found by its code, every look-alike silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ghoststep.finding import Outcome, Severity
from tests.live import influence_faults as faults
from tests.live.influence_models import TinyLM, bad, lm_batch, packed_batch, seeded, verdicts

Batch = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def large_scores(model: TinyLM) -> TinyLM:
    with torch.no_grad():
        for layer in model.layers:
            layer.qkv.weight.mul_(200)  # type: ignore[union-attr, operator]
    return model


FUTURE: dict[str, Callable[[], nn.Module]] = {
    "no causal mask": lambda: TinyLM(faults.no_causal),
    "causality dropped by a padding mask": lambda: TinyLM(faults.causal_only_without_padding_mask),
    "boolean mask inverted": lambda: TinyLM(faults.inverted),
    "soft mask -5": lambda: TinyLM(faults.soft(-5.0)),
    "-1e4 with scores that reach it": lambda: large_scores(TinyLM(faults.soft(-1e4), eager=True)),
    "leaky chunks of 2": lambda: TinyLM(faults.leaky_chunks(2)),
    "leaky chunks of 4": lambda: TinyLM(faults.leaky_chunks(4)),
    "leaky chunks of 8": lambda: TinyLM(faults.leaky_chunks(8)),
    "one leaky pair at a window's edge": lambda: TinyLM(faults.one_leaky_pair),
    "one leaky pair, eager attention": lambda: TinyLM(faults.one_leaky_pair, eager=True),
    "a layer mixes in the future": lambda: TinyLM(mix=faults.Shift(0.1)),
    "only in train mode": lambda: TinyLM(mix=faults.Shift(0.1, train_only=True)),
    "under dropout": lambda: TinyLM(faults.no_causal, dropout=0.2),
    "last tokens served first": lambda: TinyLM(mix=faults.Capacity(last_first=True, per_example=True)),
    "last tokens of the batch served first": lambda: TinyLM(mix=faults.Capacity(last_first=True, per_example=False)),
    "behind zero-initialised projections": lambda: TinyLM(faults.no_causal, zero=True),
    "behind a tiny layer scale": lambda: TinyLM(faults.no_causal, scale=1e-6),
    "in bfloat16": lambda: TinyLM(faults.no_causal).bfloat16(),
}


@pytest.mark.parametrize("name", FUTURE)
def test_a_visible_future_is_an_error(name: str) -> None:
    found = verdicts(seeded(FUTURE[name]), lm_batch())
    assert found["GS101"].outcome is Outcome.FOUND, found["GS101"].reason
    assert found["GS101"].severity is Severity.ERROR
    assert "later tokens are visible" in found["GS101"].findings[0].message


@pytest.mark.parametrize("value", [-10.0, -15.0])
def test_a_soft_mask_is_a_warning(value: float) -> None:
    found = verdicts(seeded(lambda: TinyLM(faults.soft(value))), lm_batch())
    assert found["GS101"].outcome is Outcome.FOUND
    assert found["GS101"].severity is Severity.WARNING


def test_a_leak_in_train_mode_is_found_on_a_model_given_in_eval_mode() -> None:
    model = seeded(lambda: TinyLM(mix=faults.Shift(0.1, train_only=True)), train=False)
    found = verdicts(model, lm_batch())
    assert found["GS101"].outcome is Outcome.FOUND
    assert "train mode" in found["GS101"].findings[0].message
    assert not model.training


@pytest.mark.parametrize("fast", [True, False])
def test_fast_sees_what_crosses_any_boundary(fast: bool) -> None:
    found = verdicts(seeded(lambda: TinyLM(faults.no_causal)), lm_batch(), fast=fast)
    assert found["GS101"].outcome is Outcome.FOUND
    assert verdicts(seeded(TinyLM), lm_batch(), fast=fast)["GS101"].outcome is Outcome.CLEAR


OTHER: dict[str, tuple[str, Callable[[], nn.Module], Batch]] = {
    "padding keys inverted, padded on the left": ("GS102", lambda: TinyLM(faults.keys_inverted), lm_batch(side="left")),
    "mask over queries": ("GS102", lambda: TinyLM(faults.over_queries), lm_batch(side="left")),
    "additive mask of 0 and 1": ("GS102", lambda: TinyLM(faults.added_ones), lm_batch(side="left")),
    "mask ignored, left": ("GS102", lambda: TinyLM(faults.causal_only), lm_batch(side="left")),
    "no mask passed, left": ("GS102", TinyLM, lm_batch(side="left", mask=False)),
    "recurrent over left padding": ("GS102", faults.Recurrent, lm_batch(side="left")),
    "padding keys inverted, self visible": ("GS103", lambda: TinyLM(faults.keys_inverted_but_self), lm_batch()),
    "announced documents ignored": ("GS104", TinyLM, packed_batch()),
    "announced documents, mask of ones": ("GS104", TinyLM, packed_batch(ones=True)),
    "batch norm": ("GS105", lambda: TinyLM(mix=faults.BatchNorm()), lm_batch()),
    "reshape mixes batch and time": ("GS105", lambda: TinyLM(mix=faults.MixedUpReshape()), lm_batch()),
    "left padding, learned positions": ("GS106", TinyLM, lm_batch(side="left")),
    "padding keys inverted": ("GS107", lambda: TinyLM(faults.keys_inverted), lm_batch()),
    "a query without keys": ("GS107", lambda: TinyLM(faults.empty_line), lm_batch()),
    "a query without keys, NaN everywhere": ("GS107", lambda: TinyLM(faults.empty_line, eager=True), lm_batch()),
    "a query without keys, average of all": ("GS107", lambda: TinyLM(faults.empty_line_finite, eager=True), lm_batch()),
}


@pytest.mark.parametrize("name", OTHER)
def test_each_fault_has_its_code_and_no_future_beside_it(name: str) -> None:
    code, make, batch = OTHER[name]
    found = verdicts(seeded(make), batch)
    assert found[code].outcome is Outcome.FOUND, {c: v.reason for c, v in found.items()}
    assert found[code].severity is Severity.ERROR
    assert found["GS101"].outcome is not Outcome.FOUND


HEALTHY: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "right padding": (TinyLM, lm_batch()),
    "no padding mask, right padding": (TinyLM, lm_batch(mask=False)),
    "eager attention": (lambda: TinyLM(eager=True), lm_batch()),
    "dropout": (lambda: TinyLM(dropout=0.2), lm_batch()),
    "dropout, eager attention": (lambda: TinyLM(dropout=0.2, eager=True), lm_batch()),
    "finite mask of -1e4": (lambda: TinyLM(faults.soft(-1e4)), lm_batch()),
    "sliding window": (lambda: TinyLM(faults.window), lm_batch()),
    "chunked attention": (lambda: TinyLM(faults.chunks), lm_batch()),
    "no positions": (lambda: TinyLM(absolute=False), lm_batch()),
    "left padding without absolute positions": (lambda: TinyLM(absolute=False), lm_batch(side="left")),
    "announced documents kept apart": (lambda: TinyLM(faults.packs), packed_batch()),
    "expert capacity in order": (lambda: TinyLM(mix=faults.Capacity(last_first=False, per_example=False)), lm_batch()),
    "expert capacity an example": (lambda: TinyLM(mix=faults.Capacity(last_first=False, per_example=True)), lm_batch()),
    "recurrent, right padding": (faults.Recurrent, lm_batch()),
    "zero-initialised projections": (lambda: TinyLM(zero=True), lm_batch()),
    "one example": (TinyLM, {k: v[:1] for k, v in lm_batch().items()}),
    "bfloat16": (lambda: TinyLM().bfloat16(), lm_batch()),
    "bfloat16, expert capacity": (
        lambda: TinyLM(mix=faults.Capacity(last_first=False, per_example=False)).bfloat16(),
        lm_batch(),
    ),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", HEALTHY)
def test_look_alikes_stay_silent(name: str, train: bool) -> None:
    make, batch = HEALTHY[name]
    found = verdicts(seeded(make, train=train), batch)
    assert bad(found) == set(), {c: found[c].findings[0].message for c in bad(found)}
    assert found["GS101"].outcome is Outcome.CLEAR
    assert found["GS101"].power is not None


def test_capacity_between_examples_is_a_note() -> None:
    found = verdicts(seeded(lambda: TinyLM(mix=faults.Capacity(last_first=False, per_example=False))), lm_batch())
    assert found["GS105"].outcome is Outcome.FOUND
    assert found["GS105"].severity is Severity.NOTE


@pytest.mark.parametrize("filler", [0, 1])
def test_left_padding_with_positions_that_count_real_tokens(filler: int) -> None:
    """Also transformers' way, where PAD gets position 1: 1, 1, 1, 0, 1, 2."""
    batch = lm_batch(side="left")
    keep = batch["attention_mask"]
    batch["position_ids"] = (keep.cumsum(1) - 1).masked_fill(keep == 0, filler)
    found = verdicts(seeded(TinyLM), batch)
    assert bad(found) == set()
    assert found["GS106"].outcome is Outcome.CLEAR


class TestIntent:
    def test_an_encoder_may_see_the_future(self) -> None:
        found = verdicts(seeded(lambda: TinyLM(faults.no_causal)), lm_batch(), intent="masked")
        assert found["GS101"].outcome is Outcome.NOT_APPLICABLE
        assert bad(found) == set()

    def test_masked_labels_say_that_it_is_an_encoder(self) -> None:
        batch = lm_batch()
        chosen = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(1)) < 0.4
        batch["labels"] = torch.roll(batch["input_ids"], 3, 1).masked_fill(~chosen | (batch["attention_mask"] == 0), -100)
        found = verdicts(seeded(lambda: TinyLM(faults.no_causal)), batch)
        assert "GS101" not in bad(found)

    def test_a_prefix_is_silent_and_its_leak_into_the_trained_part_is_not(self) -> None:
        batch = lm_batch(mask=False)
        batch["labels"][:, :6] = -100
        assert bad(verdicts(seeded(lambda: TinyLM(faults.prefix)), batch)) == set()
        found = verdicts(seeded(lambda: TinyLM(faults.leaky_chunks(8))), batch)
        assert found["GS101"].outcome is Outcome.FOUND

    def test_without_any_intent_a_visible_future_is_unknown(self) -> None:
        class Bare(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lm = TinyLM(faults.no_causal)

            def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
                return self.lm(input_ids, attention_mask).logits  # type: ignore[no-any-return]

        batch = lm_batch()
        del batch["labels"]
        found = verdicts(seeded(Bare), batch, loss_fn=lambda model, given: model(**given).float().square().mean())
        assert found["GS101"].outcome is Outcome.UNKNOWN
        assert "intent" in (found["GS101"].reason or "")


class TestOrder:
    @staticmethod
    def without_positions() -> nn.Module:
        model = TinyLM(faults.no_causal)
        nn.init.zeros_(model.pos.weight)
        return model

    def test_zeroed_positions_are_found_and_kept_ones_are_silent(self) -> None:
        assert "GS108" in bad(verdicts(seeded(self.without_positions), lm_batch(), intent="masked"))
        found = verdicts(seeded(lambda: TinyLM(faults.no_causal)), lm_batch(), intent="masked")
        assert found["GS108"].outcome is Outcome.CLEAR

    def test_a_causal_model_without_positions_knows_the_order(self) -> None:
        assert verdicts(seeded(lambda: TinyLM(absolute=False)), lm_batch())["GS108"].outcome is Outcome.CLEAR

    def test_a_bag_of_words_is_blind_by_design(self) -> None:
        class Bag(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.head = nn.Embedding(60, 16), nn.Linear(16, 60)

            def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
                x = self.embed(input_ids)
                return self.head(x + x.cumsum(1))  # type: ignore[no-any-return]

        batch = {"input_ids": lm_batch()["input_ids"]}
        found = verdicts(seeded(Bag), batch, loss_fn=lambda m, b: m(b["input_ids"]).square().mean())
        assert "GS108" not in bad(found)


def test_a_model_that_works_position_by_position_is_not_blind() -> None:
    class Bigram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(60, 16), nn.LayerNorm(16), nn.Linear(16, 60)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.embed(input_ids)))  # type: ignore[no-any-return]

    batch = {"input_ids": lm_batch()["input_ids"]}
    found = verdicts(seeded(Bigram), batch, loss_fn=lambda m, b: m(b["input_ids"]).square().mean())
    assert bad(found) == set()
    assert found["GS103"].outcome is Outcome.NOT_APPLICABLE


class OwnNoise(nn.Module):
    """Noise from a generator of its own, which no reset of the global one repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.01 * torch.randn(x.shape, generator=self.generator)


@pytest.mark.parametrize("examples", [1, 4])
def test_noise_that_cannot_be_repeated_is_not_a_leak(examples: int) -> None:
    batch = {k: v[:examples] for k, v in lm_batch().items()}
    found = verdicts(seeded(lambda: TinyLM(mix=OwnNoise())), batch)
    assert found["GS101"].outcome is not Outcome.FOUND, found["GS101"].findings
    assert bad(found) == set(), {c: found[c].findings for c in bad(found)}
