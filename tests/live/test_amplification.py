"""The amplification probe on real models: the reading is the gradient of the row that really stands there, and power both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import ghoststep
from ghoststep.engine import Case
from ghoststep.errors import CannotLook, UsageError
from ghoststep.evidence.amplification import FIRST, LEFT, MIDDLE, OVERFLOW_GRADIENT, PACKED, Amplification, SpikedStep
from ghoststep.evidence.base import Missing
from ghoststep.finding import Outcome, Severity, Verdict
from ghoststep.subjects.setup import make_setup

from .test_live_tables import tokenizer
from .training_setups import GruLM, batch, gru_loss, registry, same, snapshot

V, TOKEN = 64, 17
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}


def llama(depth: int = 6, **more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=depth, **HEADS, **SPECIAL, **more)
    ).train()


def gemma3(depth: int = 3) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": depth, "head_dim": 8, "tie_word_embeddings": False}
    return Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=V, **sizes, **HEADS, **SPECIAL)).train()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drop: dict[str, Any] = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_embd=32, n_layer=6, n_head=4, n_positions=64, **drop, **SPECIAL, tie_word_embeddings=False)
    ).train()


def mamba2(depth: int = 4, epsilon: float = 1e-5) -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": depth, "state_size": 16, "num_heads": 4, "head_dim": 16}
    more: dict[str, Any] = {
        "n_groups": 1,
        "chunk_size": 16,
        "tie_word_embeddings": False,
        "use_cache": False,
        "layer_norm_epsilon": epsilon,
    }
    return Mamba2ForCausalLM(Mamba2Config(vocab_size=V, **sizes, **more, **SPECIAL)).train()


def tokens(*, at: int | None = None, length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(20, V, (2, length), generator=torch.Generator().manual_seed(1))
    if at is not None:
        ids[0, at] = TOKEN
    return {"input_ids": ids, "labels": ids.clone()}


def shrink(model: Any, norm: float, row: int = TOKEN) -> Any:
    """The row in its own direction at this norm; exactly zero for 0."""
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        values = weight[row].double()
        weight[row] = (values / values.norm() * norm).to(weight.dtype)
    return model


def fact(given: Mapping[str, Any], kind: type = Amplification) -> Any:
    return Case([make_setup(dict(given))], registry().instruments).fact(kind)


def verdict(given: Mapping[str, Any], code: str = "GS305", **more: Any) -> Verdict:
    return ghoststep.check(**given, select=["GS3"], **more).verdict(code)


def real_gradient(model: Any, given: Mapping[str, torch.Tensor]) -> float:
    model.zero_grad()
    model(**given).loss.backward()
    return float(model.get_input_embeddings().weight.grad[TOKEN].double().norm())


TWINS = {"llama": (llama, 0), "llama, middle": (llama, 8), "gemma3": (gemma3, 0), "mamba2": (mamba2, 8), "gpt2": (gpt2, 0)}


class TestTwin:
    @pytest.mark.parametrize("name", TWINS)
    @pytest.mark.parametrize("norm", [0.1, 1e-6, 1e-20])
    def test_the_reading_is_the_gradient_of_the_row_in_the_table(self, name: str, norm: float) -> None:
        make, at = TWINS[name]
        model = shrink(make(), norm)
        given = tokens(at=at)
        found = ghoststep.amplify(model=model, batch=given, rows=[TOKEN], norms=[1.0])
        place = found.place(FIRST if at == 0 else MIDDLE)
        assert (place.example, place.position) == (0, at)
        reading = next(r for r in place.readings if r.table_row == TOKEN)
        assert reading.norm == pytest.approx(norm, rel=1e-5)
        assert reading.gradient == pytest.approx(real_gradient(model, given), rel=1e-4)

    @pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2"])
    def test_bfloat16(self, name: str) -> None:
        make, at = TWINS[name]
        model = shrink(make().to(torch.bfloat16), 1e-12)
        given = tokens(at=at)
        place = ghoststep.amplify(model=model, batch=given, rows=[TOKEN], norms=[1.0]).place(FIRST if at == 0 else MIDDLE)
        reading = next(r for r in place.readings if r.table_row == TOKEN)
        assert reading.gradient == pytest.approx(real_gradient(model, given), rel=0.2)

    @pytest.mark.parametrize("norm", [0.1, 1e-6])
    def test_the_total_is_the_norm_of_the_whole_model(self, norm: float) -> None:
        model = shrink(llama(), norm)
        given = tokens(at=0)
        place = ghoststep.amplify(model=model, batch=given, rows=[TOKEN], norms=[1.0]).place(FIRST)
        reading = next(r for r in place.readings if r.table_row == TOKEN)
        real_gradient(model, given)
        total = float(torch.stack([p.grad.double().norm() for p in model.parameters()]).norm())
        assert reading.total == pytest.approx(total, rel=1e-4)


class TestNothingChanges:
    @pytest.mark.parametrize("make", [llama, mamba2])
    def test_bit_for_bit(self, make: Any) -> None:
        model = shrink(make(), 1e-20)
        given: dict[str, Any] = {"model": model, "batch": tokens(at=8)}
        before = snapshot(given)
        ghoststep.amplify(**given, norms=[1.0, 1e-20])
        fact(given)
        assert same(before, snapshot(given))

    def test_the_spiked_step_is_undone(self) -> None:
        given = stepping(shrink(mamba2(6), 1e-30), lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0))
        before = snapshot(given)
        assert isinstance(fact(given, SpikedStep), SpikedStep)
        assert same(before, snapshot(given))


def stepping(model: Any, clip: Any) -> dict[str, Any]:
    def train_step(model: Any, optimizer: Any, given: Any) -> float:
        optimizer.zero_grad()
        loss = model(**given).loss
        loss.backward()
        clip(model)
        optimizer.step()
        return float(loss.detach())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return {"model": model, "batch": tokens(at=8), "optimizer": optimizer, "train_step": train_step, "max_grad_norm": 1.0}


class TestPower:
    def test_recurrent_middle_is_found(self) -> None:
        said = verdict({"model": shrink(mamba2(6), 1e-30), "batch": tokens(at=8)})
        assert (said.outcome, said.severity) == (Outcome.FOUND, Severity.ERROR)
        assert said.findings[0].where.table_row == TOKEN

    @pytest.mark.parametrize("make", [gpt2, lambda: llama(2)])
    def test_lifted_and_shallow_are_clear(self, make: Any) -> None:
        assert verdict({"model": shrink(make(), 1e-30), "batch": tokens(at=8)}).outcome is Outcome.CLEAR

    def test_attention_only_is_found_where_the_token_stands_first(self) -> None:
        assert verdict({"model": shrink(llama(8), 1e-30), "batch": tokens(at=0)}).severity is Severity.ERROR
        assert verdict({"model": shrink(llama(8), 1e-30), "batch": tokens(at=8)}).severity is Severity.WARNING

    def test_a_healthy_table_is_not_applicable(self) -> None:
        said = verdict({"model": mamba2(), "batch": tokens()})
        assert (said.outcome, "near zero" in str(said.reason)) == (Outcome.NOT_APPLICABLE, True)

    def test_the_padding_row_is_silent(self) -> None:
        model = shrink(mamba2(6), 0.0, row=0)
        given = tokens()
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][1, 12:] = 0
        given["input_ids"][1, 12:] = 0
        given["labels"][1, 12:] = -100
        assert verdict({"model": model, "batch": given}).outcome is Outcome.NOT_APPLICABLE

    def test_a_frozen_table_is_not_applicable(self) -> None:
        model = shrink(mamba2(6), 1e-30)
        model.get_input_embeddings().weight.requires_grad_(False)
        assert verdict({"model": model, "batch": tokens(at=8)}).outcome is Outcome.NOT_APPLICABLE

    def test_a_tied_table(self) -> None:
        model = shrink(llama(8, tie_word_embeddings=True), 1e-30)
        assert verdict({"model": model, "batch": tokens(at=0)}).severity is Severity.ERROR

    def test_fast_looks_too(self) -> None:
        assert verdict({"model": shrink(mamba2(6), 1e-30), "batch": tokens(at=8)}, fast=True).severity is Severity.ERROR

    def test_the_row_in_the_batch_is_fed_beside_the_smallest(self) -> None:
        model = shrink(shrink(shrink(mamba2(), 1e-20), 1e-25, row=5), 1e-8, row=6)
        found = fact({"model": model, "batch": tokens(at=8)})
        assert {r.table_row for p in found.places for r in p.readings} == {5, TOKEN}

    def test_a_module_that_is_no_transformer(self) -> None:
        torch.manual_seed(0)
        model = GruLM()
        with torch.no_grad():
            model.token_table.weight[7] = 1e-20
        found = fact({"model": model, "batch": batch(), "loss_fn": gru_loss})
        assert isinstance(found, Amplification)
        assert found.worst(7) is not None

    def test_a_batch_that_changes_by_itself_is_unknown(self) -> None:
        def loss_fn(model: Any, given: Any) -> torch.Tensor:
            ids = torch.randint(20, V, given["input_ids"].shape)
            loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
            return loss

        missing = fact({"model": shrink(mamba2(), 1e-20), "batch": tokens(), "loss_fn": loss_fn})
        assert isinstance(missing, Missing | Amplification)
        if isinstance(missing, Missing):
            assert missing.outcome is Outcome.UNKNOWN


class TestSpikedStep:
    @pytest.mark.parametrize(
        ("clip", "survives"),
        [
            (lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0), False),
            (lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), float("inf")), False),
            (lambda m: ghoststep.clip_grad_norm_(m, 1.0), True),
            (lambda m: ghoststep.clip_grad_norm_(m, 1.0, mode="group"), False),
            (lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1.0), True),
            (lambda m: None, True),
        ],
        ids=["torch", "torch, inf", "row", "group", "value", "none"],
    )
    def test_the_clip_shows_by_what_it_does(self, clip: Any, survives: bool) -> None:
        given = stepping(shrink(mamba2(6), 1e-30), clip)
        assert fact(given, SpikedStep).survives is survives
        assert verdict(given).outcome is (Outcome.CLEAR if survives else Outcome.FOUND)

    def test_our_own_package_is_no_state_of_the_user_s(self) -> None:
        """A train_step that names `ghoststep` itself: putting its state back must not put back ours under it."""

        def train_step(model: Any, optimizer: Any, given: Any) -> None:
            model(**given).loss.backward()
            ghoststep.clip_grad_norm_(model, 1.0)
            optimizer.step()

        given = {**stepping(shrink(mamba2(6), 1e-30), None), "train_step": train_step}
        assert fact(given, SpikedStep).survives
        assert verdict(given).outcome is Outcome.CLEAR

    def test_it_is_not_run_without_a_spike(self) -> None:
        given = stepping(shrink(gpt2(), 1e-30), lambda m: None)
        assert fact(given, SpikedStep).outcome is Outcome.NOT_APPLICABLE


class TestAmplify:
    def test_made_batches_have_every_place(self) -> None:
        found = ghoststep.amplify(model=llama(8), norms=[1.0, 1e-6, 1e-12])
        assert [p.name for p in found.places] == [FIRST, MIDDLE, PACKED, LEFT]
        assert found.skipped == ()
        by_name = {p.name: p.readings[2].gradient for p in found.places}
        assert by_name[MIDDLE] < 10
        assert min(by_name[n] for n in (FIRST, PACKED, LEFT)) > 1e5
        text, svg = found.to_text(80), found.to_svg()
        assert "overflow" in text
        assert max(map(len, text.splitlines())) <= 80
        assert svg.startswith("<svg ")
        assert all(name in svg for name in by_name)
        assert "\x1b[" in found.to_text(80, color=True)

    def test_what_cannot_be_packed_says_so(self) -> None:
        found = ghoststep.amplify(model=mamba2(), norms=[1.0])
        assert [name for name, _ in found.skipped] == [PACKED]
        assert "apart" in found.to_text()

    def test_an_exactly_zero_row_is_fed_as_it_is(self) -> None:
        found = ghoststep.amplify(model=shrink(llama(), 0.0), batch=tokens(), rows=[TOKEN], norms=[1.0])
        assert [(r.norm, r.table_row) for r in found.place(MIDDLE).readings] == [(0.0, TOKEN)]
        assert "0 (row 17)" in found.to_text()
        assert found.to_svg().startswith("<svg ")

    def test_misuse_is_told(self) -> None:
        with pytest.raises(UsageError, match="place 'begin'"):
            ghoststep.amplify(model=llama(), places=["begin"])
        with pytest.raises(UsageError, match="norms"):
            ghoststep.amplify(model=llama(), norms=[0.0])
        with pytest.raises(UsageError, match="batch is missing"):
            ghoststep.amplify(model=nn.Linear(2, 2))
        with pytest.raises(CannotLook, match="rows 0 to"):
            ghoststep.amplify(model=llama(), rows=[V])
        with pytest.raises(UsageError, match="`model` is a str"):
            ghoststep.amplify("a/checkpoint")

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"places": "middle"}, "places is 'middle'; expected a list"),
            ({"places": None}, "places is None"),
            ({"rows": 17}, r"rows is 17; expected a list of table rows"),
            ({"rows": ["a"]}, "rows is"),
            ({"rows": [1.5]}, "rows is"),
            ({"norms": 1.0}, "norms is 1.0; expected a list"),
            ({"norms": ["1"]}, "norms is"),
            ({"norms": [float("inf")]}, "norms is"),
            ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; expected a number above 0"),
            ({"max_grad_norm": -1}, "max_grad_norm is -1"),
            ({"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
            ({"max_grad_norm": "1"}, "max_grad_norm is '1'"),
        ],
    )
    def test_wrong_values_are_told(self, given: dict[str, Any], words: str) -> None:
        with pytest.raises(UsageError, match=words):
            ghoststep.amplify(nn.Embedding(4, 2), **given)

    def test_what_other_libraries_give_is_taken(self) -> None:
        rows, norms = torch.tensor([TOKEN]), torch.logspace(0, -6, 2).numpy()
        found = ghoststep.amplify(gpt2(), batch=tokens(), rows=rows, norms=norms, places=(MIDDLE,), max_grad_norm=2)  # type: ignore[arg-type]
        assert found.lost == 2000
        assert {r.direction for r in found.place(MIDDLE).readings} == {TOKEN}

    def test_the_name_stays_the_function(self) -> None:
        ghoststep.amplify(model=gpt2(), norms=[1.0], places=[MIDDLE])
        assert callable(ghoststep.amplify)


@pytest.mark.parametrize(("make", "at"), [(lambda: mamba2(8), 8), (lambda: llama(24), 0)], ids=["mamba2", "llama"])
@pytest.mark.slow
def test_the_overflow_is_predicted_within_a_factor_3(make: Any, at: int) -> None:
    model, given = make(), tokens(at=at)
    name = FIRST if at == 0 else MIDDLE
    predicted = (
        ghoststep.amplify(model=model, batch=given, rows=[TOKEN], places=[name]).place(name).critical_norm(OVERFLOW_GRADIENT)
    )

    def overflows(norm: float) -> bool:
        real_gradient(shrink(model, norm), given)
        return bool(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isinf())

    assert overflows(predicted / 3)
    assert not overflows(predicted * 3)


class TestThroughGs301:
    """With a tokenizer the figure decides GS301 and GS302, and GS305 is their symptom."""

    def given(self, model: Any) -> dict[str, Any]:
        words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, V))]
        return {"model": model, "batch": tokens(at=8), "tokenizer": tokenizer(words)}

    def test_one_cause_one_error(self) -> None:
        report = ghoststep.check(**self.given(shrink(mamba2(6), 1e-30)), select=["GS3"])
        cause = report.verdict("GS301")
        assert (cause.outcome, cause.severity) == (Outcome.FOUND, Severity.ERROR)
        assert "Measured on this model" in cause.findings[0].message
        assert [s.code for s in cause.findings[0].symptoms] == ["GS305"]
        assert [v.code for v in report.verdicts if v.findings and v.severity is Severity.ERROR] == ["GS301"]

    def test_a_recurrence_that_does_not_amplify_is_cleared(self) -> None:
        said = verdict(self.given(shrink(mamba2(2, epsilon=1e-2), 1e-30)), "GS301")
        assert (said.outcome, said.severity) == (Outcome.FOUND, Severity.NOTE)
        assert "harmless here" in said.findings[0].message

    def test_an_exact_zero(self) -> None:
        said = verdict(self.given(shrink(mamba2(6), 0.0)), "GS302")
        assert said.outcome is Outcome.FOUND
        assert "Measured on this model" in said.findings[0].message

    def test_our_clip_makes_it_a_note(self) -> None:
        model = shrink(mamba2(6), 1e-30)
        kept = {**self.given(model), **stepping(model, lambda m: ghoststep.clip_grad_norm_(m, 1.0))}
        said = verdict(kept, "GS301")
        assert (said.outcome, said.severity) == (Outcome.FOUND, Severity.NOTE)
