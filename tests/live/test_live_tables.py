"""Tables, tie, tokenizer and saving of a model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ghoststep.engine import Case
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, Tables
from ghoststep.evidence.plan import TrainingKind, TrainingPlan
from ghoststep.evidence.rows import InputRows, OutputRows
from ghoststep.evidence.tokenizer import TemplateTokens, Vocabulary
from ghoststep.evidence.wiring import Mixing, MixingClass, Tie, TieState
from ghoststep.finding import Outcome, Severity
from ghoststep.subjects.setup import make_setup

from .training_setups import GruLM, alarms, gru, hf, llama, registry, same, snapshot, verdicts


def fact(given: dict[str, Any], kind: type) -> Any:
    return Case([make_setup(given)], registry().instruments).fact(kind)


def tokenizer(words: list[str], *, template: str | None = None) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=words[0], eos_token=words[2], bos_token=words[1])  # type: ignore[no-untyped-call]
    made.chat_template = template
    return made


class TestTables:
    def test_of_a_module_with_odd_names(self) -> None:
        tables = fact(gru(), Tables)
        assert tables.input.tensor.name == "token_table.weight"
        assert tables.output is not None
        assert tables.output.tensor.name == "out.weight"
        assert (tables.input.num_rows, tables.input.num_dims) == (40, 16)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_rows_are_the_model_s(self, dtype: torch.dtype) -> None:
        model = GruLM().to(dtype)
        with torch.no_grad():
            model.token_table.weight[7] = 0
            model.token_table.weight[9] = model.token_table.weight[8]
        given = gru(model=model, train_step=None, optimizer=None)
        before = snapshot(given)
        rows = fact(given, InputRows).rows
        expected = model.token_table.weight.detach().double().norm(dim=1).numpy()
        assert np.allclose(rows.norms_R, expected, rtol=1e-6)
        assert bool(rows.zero_R[7])
        assert rows.identical_groups == ((8, 9),)
        assert not fact(given, OutputRows).tied
        assert same(before, snapshot(given))

    def test_mixing_from_names_and_config(self) -> None:
        found = fact(hf(llama()), MixingClass)
        assert found.mixing is Mixing.ATTENTION
        assert found.causal is True

    def test_declared_from_the_config_in_memory(self) -> None:
        found = fact(hf(llama(tied=True)), Declared)
        assert (found.vocab_size, found.hidden_size, found.tie_word_embeddings) == (64, 32, True)
        assert isinstance(fact(gru(), Declared), Missing)

    def test_the_table_s_gradient_decides_the_kind_of_training(self) -> None:
        model = llama()
        assert fact(hf(model), TrainingPlan).training is TrainingKind.FULL
        assert fact({**hf(model), "intent": "rl"}, TrainingPlan).training is TrainingKind.RL
        model.model.embed_tokens.weight.requires_grad_(False)
        assert fact(hf(model), TrainingPlan).training is TrainingKind.FROZEN_EMBEDDINGS

    def test_peft_adapter_over_a_frozen_base(self) -> None:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], r=2))
        given = hf(model)
        assert fact(given, TrainingPlan).training is TrainingKind.FROZEN_EMBEDDINGS
        assert fact(given, Tables).input.num_rows == 64
        assert alarms(given, "GS") == {}

    def test_peft_trained_head_and_embedding(self) -> None:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["embed_tokens", "lm_head"])
        given = hf(peft.get_peft_model(llama(), config))
        assert fact(given, TrainingPlan).training is TrainingKind.FULL
        assert alarms(given, "GS") == {}


class TestTie:
    def untie(self, *, same_values: bool) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
        model = GPT2LMHeadModel(config)
        weight = model.lm_head.weight.detach().clone()
        model.lm_head.weight = nn.Parameter(weight if same_values else weight + 0.1)
        return model

    def test_flag_true_and_other_values(self) -> None:
        found = verdicts(hf(self.untie(same_values=False)), "GS006")["GS006"]
        assert found.severity is Severity.ERROR
        assert "do not share storage" in found.findings[0].message
        assert "64 of 64 table rows" in found.findings[0].message

    def test_flag_true_and_equal_values_drift(self) -> None:
        model = self.untie(same_values=True)
        assert verdicts(hf(model), "GS006")["GS006"].severity is Severity.ERROR
        model.transformer.wte.weight.requires_grad_(False)
        assert verdicts(hf(model), "GS006")["GS006"].severity is Severity.WARNING
        model.lm_head.weight.requires_grad_(False)
        assert verdicts(hf(model), "GS006")["GS006"].outcome is Outcome.CLEAR

    def test_flag_false_and_shared_is_a_note(self) -> None:
        model = llama(tied=False)
        model.lm_head.weight = model.model.embed_tokens.weight
        found = verdicts(hf(model), "GS006")["GS006"]
        assert found.severity is Severity.NOTE

    @pytest.mark.parametrize("tied", [True, False])
    def test_right_either_way(self, tied: bool) -> None:
        given = hf(llama(tied=tied))
        assert verdicts(given, "GS006")["GS006"].outcome is Outcome.CLEAR
        assert fact(given, TieState).tie is (Tie.TIED if tied else Tie.UNTIED)

    def test_a_class_that_ties_nothing_ignores_the_flag(self) -> None:
        model = llama(tied=False)
        model.config.tie_word_embeddings = True
        model._tied_weights_keys = None
        assert fact(hf(model), TieState).declared is None
        assert verdicts(hf(model), "GS006")["GS006"].outcome is Outcome.CLEAR


WORDS = ["<pad>", "<s>", "</s>", "<|u|>", "<|a|>", *(f"w{i}" for i in range(40))]
TEMPLATE = "{% for m in messages %}{{ '<|u|> ' if m.role == 'user' else '<|a|> ' }}{{ m.content }} </s> {% endfor %}"


class TestTokenizer:
    def test_vocabulary_and_template(self) -> None:
        given = {**hf(llama()), "tokenizer": tokenizer(WORDS, template=TEMPLATE)}
        assert fact(given, Vocabulary).num_tokens == len(WORDS)
        assert set(fact(given, TemplateTokens).ids) >= {2, 3, 4}

    def test_a_bare_tokenizers_object(self) -> None:
        given = {**hf(llama()), "tokenizer": tokenizer(WORDS).backend_tokenizer}
        assert fact(given, Vocabulary).num_tokens == len(WORDS)

    def test_an_unknown_object_is_unknown(self) -> None:
        found = fact({**hf(llama()), "tokenizer": object()}, Vocabulary)
        assert isinstance(found, Missing)
        assert "save_pretrained" in found.reason

    def test_dead_markers_under_a_frozen_table_only(self) -> None:
        from transformers import MambaConfig, MambaForCausalLM

        torch.manual_seed(0)
        config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4, pad_token_id=0, bos_token_id=1,
                             eos_token_id=2)  # fmt: skip
        model = MambaForCausalLM(config)
        with torch.no_grad():
            model.get_input_embeddings().weight[[3, 4]] = 0  # type: ignore[no-untyped-call]
            model.get_input_embeddings().weight[50:] = 0  # type: ignore[no-untyped-call]
        given = {**hf(model), "tokenizer": tokenizer(WORDS, template=TEMPLATE)}
        assert verdicts(given, "GS303")["GS303"].severity is Severity.WARNING
        model.get_input_embeddings().weight.requires_grad_(False)  # type: ignore[no-untyped-call]
        given = {**hf(model), "tokenizer": tokenizer(WORDS, template=TEMPLATE)}
        found = verdicts(given, "GS303")["GS303"]
        assert found.severity is Severity.ERROR
        assert {f.where.token_id for f in found.findings} == {3, 4}


class TestNewRows:
    def make(self, *, mean: bool) -> dict[str, Any]:
        model = llama()
        with torch.no_grad():
            model.lm_head.weight *= 3
            model.model.norm.weight.fill_(1.0)
            direction = torch.randn(32, generator=torch.Generator().manual_seed(1))
            for layer in (model.model.layers[0].mlp.down_proj, model.model.layers[1].mlp.down_proj):
                layer.weight.zero_()
            model.model.embed_tokens.weight += direction
            model.lm_head.weight -= 0.2 * direction  # a trained head: most logits are low
            for i in range(20, 25):
                model.lm_head.weight[i] += 0.28 * direction
            model.lm_head.weight[60:] = model.lm_head.weight[:60].mean(0) if mean else 0.0
            if not mean:
                model.lm_head.weight[60:] = 0.12 * direction
        made = tokenizer([f"w{i}" for i in range(60)])
        made.add_tokens([f"<new{i}>" for i in range(4)])
        batches = [{k: v.clamp(max=59) for k, v in b.items()} for b in hf(model)["batches"]]
        for b in batches:
            b["attention_mask"].fill_(1)
        return {"model": model, "batches": batches, "tokenizer": made}

    def test_rows_that_outshine_the_others(self) -> None:
        found = verdicts(self.make(mean=False), "GS007")["GS007"]
        assert found.severity is Severity.ERROR
        assert found.findings[0].where.table_row == 60

    def test_rows_at_the_mean_are_silent(self) -> None:
        assert verdicts(self.make(mean=True), "GS007")["GS007"].outcome is Outcome.CLEAR


class TestSaving:
    def run(self, keep: Any) -> dict[str, Any]:
        model = GruLM()

        def save(given: Any, folder: str) -> None:
            torch.save({k: v for k, v in given.state_dict().items() if keep(k)}, Path(folder) / "w.pt")

        def load(folder: str) -> Any:
            fresh = GruLM()
            fresh.load_state_dict(torch.load(Path(folder) / "w.pt", weights_only=True), strict=False)
            return fresh

        return gru(model=model, save=save, load=load)

    def test_a_part_that_is_not_saved(self) -> None:
        given = self.run(lambda k: not k.startswith("out"))
        before = snapshot(given)
        found = alarms(given, "GS6")
        assert set(found) == {"GS611"}
        assert "out.weight" in found["GS611"]
        assert same(before, snapshot(given))

    def test_everything_saved(self) -> None:
        assert alarms(self.run(lambda k: True)) == {}
        assert verdicts(self.run(lambda k: True), "GS611")["GS611"].outcome is Outcome.CLEAR
