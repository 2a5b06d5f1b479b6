"""Parameters, optimizer and gradients of a setup: each mechanism on families of our own, and its healthy twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ghoststep.engine import Case
from ghoststep.evidence.training import Gradient, LiveWiring
from ghoststep.finding import Outcome, Severity
from ghoststep.subjects.setup import make_setup

from .training_setups import D, GruLM, V, alarms, batch, gru, gru_loss, hf, llama, registry, same, snapshot, verdicts


def wiring_of(given: dict[str, Any]) -> LiveWiring:
    found = Case([make_setup(given)], registry().instruments).fact(LiveWiring)
    assert isinstance(found, LiveWiring), found
    return found


class TestFacts:
    def test_gradients_are_those_of_a_plain_backward(self) -> None:
        given = gru()
        wiring = wiring_of(given)
        loss = gru_loss(given["model"], given["batches"][0])
        loss.backward()  # type: ignore[no-untyped-call]
        for name, p in given["model"].named_parameters():
            facts = wiring.named(name)
            assert facts is not None
            assert p.grad is not None
            assert facts.gradient is Gradient.NORMAL
            assert facts.gradient_norm == pytest.approx(float(p.grad.double().norm()), rel=1e-6)
        assert wiring.loss == pytest.approx(float(loss.detach()))

    def test_a_tied_parameter_is_listed_once(self) -> None:
        model = llama(tied=True)
        wiring = wiring_of(hf(model))
        names = [p.name for p in wiring.parameters]
        assert "lm_head.weight" not in names
        table = wiring.named("lm_head.weight")
        assert table is not None
        assert table.name == "model.embed_tokens.weight"
        assert table.group == 0

    def test_fed_rows_are_the_tokens_of_the_batch(self) -> None:
        given = gru()
        tokens = given["batches"][0]["tokens"]
        wiring = wiring_of(given)
        table = next(t for t in wiring.tables if t.parameter == "token_table.weight")
        assert set(table.fed_rows) == {int(t) for t in tokens[:, :-1].unique()}
        assert table.masked_rows == ()

    def test_nothing_changes(self) -> None:
        for given in (gru(), hf(llama()), hf(llama(torch.bfloat16))):
            given["model"].train()
            before = snapshot(given)
            wiring_of(given)
            assert same(before, snapshot(given))

    def test_existing_gradients_stay(self) -> None:
        given = gru()
        gru_loss(given["model"], given["batches"][1]).backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in given["model"].parameters()]
        before = snapshot(given)
        wiring_of(given)
        assert same(before, snapshot(given))
        assert all(p.grad is g for p, g in zip(given["model"].parameters(), grads, strict=True))


class TestOptimizer:
    def test_stale_table_after_the_module_was_replaced(self) -> None:
        model = GruLM()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.out = nn.Linear(D, V + 4)
        found = verdicts(gru(model=model, optimizer=optimizer), "GS601", "GS602")
        assert found["GS601"].severity is Severity.ERROR
        assert "out.weight" in found["GS601"].findings[0].message
        assert "orphan of shape [40, 16]" in found["GS601"].findings[0].message
        assert found["GS602"].severity is Severity.WARNING

    def test_forgotten_group(self) -> None:
        found = alarms(gru(optimizer=lambda m: torch.optim.AdamW([p for n, p in m.named_parameters() if "table" not in n])))
        assert set(found) == {"GS601"}
        assert "token_table.weight" in found["GS601"]

    def test_whole_model_replaced(self) -> None:
        found = verdicts(gru(optimizer=torch.optim.AdamW(GruLM().parameters())), "GS601", "GS602")
        assert found["GS601"].severity is Severity.ERROR
        assert found["GS602"].severity is Severity.ERROR

    def test_head_only_without_freezing_is_a_warning(self) -> None:
        found = verdicts(gru(optimizer=lambda m: torch.optim.AdamW(m.out.parameters())), "GS601")
        assert found["GS601"].severity is Severity.WARNING

    def test_frozen_on_purpose_and_textual_inversion_are_silent(self) -> None:
        model = GruLM()
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("token_table"))
        assert alarms(gru(model=model, optimizer=torch.optim.AdamW([model.token_table.weight], weight_decay=0.0))) == {}

    def test_frozen_parameters_in_the_optimizer_are_silent(self) -> None:
        model = llama()
        for name, p in model.named_parameters():
            p.requires_grad_("q_proj" in name)
        assert alarms(hf(model, optimizer=torch.optim.AdamW(model.parameters()))) == {}

    def test_two_optimizers(self) -> None:
        def step(model: Any, optimizers: Any, given: Any) -> float:
            for o in optimizers:
                o.zero_grad()
            loss = gru_loss(model, given)
            loss.backward()  # type: ignore[no-untyped-call]
            for o in optimizers:
                o.step()
            return float(loss)

        def split(model: Any) -> list[torch.optim.Optimizer]:
            table = [model.token_table.weight]
            rest = [p for p in model.parameters() if p is not table[0]]
            return [torch.optim.SGD(table, lr=0.1), torch.optim.AdamW(rest)]

        assert alarms(gru(optimizer=split, train_step=step)) == {}

    def test_second_optimizer_that_the_setup_does_not_show(self) -> None:
        model = GruLM()
        hidden = torch.optim.SGD([model.token_table.weight], lr=0.1)
        shown = torch.optim.SGD([p for n, p in model.named_parameters() if "table" not in n], lr=0.1)

        def step(model: Any, optimizer: Any, given: Any) -> float:
            optimizer.zero_grad()
            hidden.zero_grad()
            loss = gru_loss(model, given)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            hidden.step()
            return float(loss)

        given = gru(model=model, optimizer=shown, train_step=step)
        before = snapshot(given)
        assert alarms(given, "GS6") == {}
        assert same(before, snapshot(given))

    def test_a_parameter_of_the_loss_is_no_orphan(self) -> None:
        model = GruLM()
        weight = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.AdamW([*model.parameters(), weight])
        given = gru(model=model, optimizer=optimizer, loss_fn=lambda m, b: gru_loss(m, b) * weight, train_step=None)
        assert alarms(given) == {}
        assert verdicts(given, "GS602")["GS602"].outcome is Outcome.CLEAR
        assert weight.grad is None

    def test_master_weights_are_unknown(self) -> None:
        model = GruLM().bfloat16()
        masters = [p.detach().clone().float().requires_grad_(True) for p in model.parameters()]
        found = verdicts(gru(model=model, optimizer=torch.optim.AdamW(masters), train_step=None), "GS601", "GS602")
        assert {v.outcome for v in found.values()} == {Outcome.UNKNOWN}

    def test_without_optimizer_is_unknown(self) -> None:
        assert verdicts(gru(optimizer=None, train_step=None), "GS601")["GS601"].outcome is Outcome.UNKNOWN


class Gated(nn.Module):
    """Adapters in a residual stack; `cut` says how the graph is broken."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.cut = cut
        self.table = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(3))
        self.pooler = nn.Linear(D, D)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.head = nn.Linear(D, V)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.table(tokens)
        self.pooler(hidden[:, 0])  # computed, never read
        for block in self.blocks:
            if self.cut == "no_grad":
                with torch.no_grad():
                    hidden = hidden + block(hidden)
            elif self.cut == "detach":
                hidden = hidden + block(hidden).detach()
            elif self.cut in ("reentrant", "plain"):
                hidden = hidden + checkpoint(block, hidden, use_reentrant=self.cut == "reentrant")
            else:
                hidden = hidden + block(hidden)
        hidden = hidden + self.experts[int(tokens[0, 0]) % 2](hidden)  # experts 2 and 3 never get a token
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class TestCutGraph:
    @pytest.mark.filterwarnings("ignore:None of the inputs")
    @pytest.mark.parametrize(("cut", "word"), [("reentrant", "reentrant"), ("no_grad", "no_grad"), ("detach", "detach")])
    def test_found_with_its_cause(self, cut: str, word: str) -> None:
        torch.manual_seed(0)
        model = Gated(cut)
        model.table.weight.requires_grad_(False)
        found = verdicts({"model": model, "batch": batch()}, "GS603")["GS603"]
        assert found.outcome is Outcome.FOUND
        assert len(found.findings) == 1
        message = found.findings[0].message
        assert "6 of 18 trainable parameters (blocks.0.0.weight" in message
        assert word in message

    @pytest.mark.parametrize("cut", ["", "plain"])
    def test_unused_pooler_and_empty_experts_are_silent(self, cut: str) -> None:
        torch.manual_seed(0)
        found = verdicts({"model": Gated(cut), "batch": batch()}, "GS603")["GS603"]
        assert found.outcome is Outcome.CLEAR
        assert found.reason is not None
        assert "does not depend on" in found.reason

    def test_reentrant_behind_a_trained_table_is_silent(self) -> None:
        found = verdicts({"model": Gated("reentrant"), "batch": batch()}, "GS603")["GS603"]
        assert found.outcome is Outcome.CLEAR

    def test_a_discrete_choice_has_no_gradient_by_nature(self) -> None:
        class Indexer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.score = nn.Linear(D, 1)

            def forward(self, hidden: torch.Tensor) -> torch.Tensor:
                chosen: torch.Tensor = self.score(hidden).squeeze(-1).topk(4, dim=-1).indices
                return chosen

        class Sparse(GruLM):
            def __init__(self) -> None:
                super().__init__()
                self.indexer = Indexer()

            def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
                hidden = self.token_table(tokens)
                chosen = self.indexer(hidden.detach())
                picked = hidden.gather(1, chosen[..., None].expand(-1, -1, D)).mean(1, keepdim=True)
                logits = self.out(hidden + picked)
                assert targets is not None
                return functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()), logits

        torch.manual_seed(0)
        found = verdicts({"model": Sparse(), "batch": batch(), "loss_fn": gru_loss}, "GS603")["GS603"]
        assert found.outcome is Outcome.CLEAR

    def test_a_target_network_that_no_optimizer_holds_is_silent(self) -> None:
        class Byol(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.online, self.target = nn.Embedding(V, D), nn.Embedding(V, D)

            def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
                with torch.no_grad():
                    aim = self.target(targets)
                return {"loss": (self.online(tokens) - aim).square().mean()}

        model = Byol()
        given: dict[str, Any] = {"model": model, "batch": batch()}
        assert set(alarms({**given, "optimizer": torch.optim.SGD(model.online.parameters(), lr=0.1)})) == set()
        assert set(alarms({**given, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})) == {"GS603"}

    def test_everything_cut(self) -> None:
        given = gru(loss_fn=lambda m, b: gru_loss(m, b).detach(), train_step=None)
        found = verdicts(given, "GS603")["GS603"]
        assert found.severity is Severity.ERROR
        assert "requires no gradient" in found.findings[0].message

    def test_values_are_put_back_after_perturbing(self) -> None:
        given: dict[str, Any] = {"model": Gated("detach"), "batch": batch()}
        before = snapshot(given)
        verdicts(given, "GS603")
        assert same(before, snapshot(given))


class TestFrozen:
    def test_optimizer_of_frozen_parameters(self) -> None:
        model = GruLM()
        for p in model.parameters():
            p.requires_grad_(False)
        found = verdicts(gru(model=model, optimizer=torch.optim.AdamW(model.parameters()), train_step=None), "GS604")["GS604"]
        assert found.severity is Severity.ERROR

    def test_frozen_head_while_all_else_trains(self) -> None:
        model = llama()
        model.lm_head.weight.requires_grad_(False)
        found = verdicts(hf(model, optimizer=torch.optim.AdamW(model.parameters())), "GS604")["GS604"]
        assert found.severity is Severity.WARNING
        assert "lm_head.weight" in found.findings[0].message

    def test_one_projection_of_one_layer(self) -> None:
        model = llama()
        model.model.layers[1].self_attn.q_proj.weight.requires_grad_(False)
        found = verdicts(hf(model, optimizer=torch.optim.AdamW(model.parameters())), "GS604")["GS604"]
        assert found.severity is Severity.WARNING

    @pytest.mark.parametrize("prefix", ["model.embed_tokens", "model.layers.0."])
    def test_frozen_table_or_layer_is_silent(self, prefix: str) -> None:
        model = llama()
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(prefix))
        assert alarms(hf(model, optimizer=torch.optim.AdamW(model.parameters()))) == {}


class TestPaddingIndex:
    def test_real_token_in_the_middle(self) -> None:
        given = gru(model=GruLM(padding_idx=5), batches=[batch(0, size=12)])
        assert bool((given["batches"][0]["tokens"] == 5).any())
        found = verdicts(given, "GS605")["GS605"]
        assert found.severity is Severity.ERROR
        assert found.findings[0].where.token_id == 5

    def test_only_padding(self) -> None:
        tokens = batch(0)["tokens"].clone()
        tokens[1:, -3:] = 0
        given = gru(model=GruLM(padding_idx=0), batches=[{"tokens": tokens, "targets": tokens.masked_fill(tokens == 0, -100)}])
        assert verdicts(given, "GS605")["GS605"].outcome is Outcome.CLEAR
        assert alarms(given) == {}

    def test_masked_left_padding_of_an_hf_model(self) -> None:
        given = hf(llama())
        for b in given["batches"]:
            b["input_ids"][1:, :3], b["attention_mask"][1:, :3], b["labels"][1:, :3] = 0, 0, -100
        assert verdicts(given, "GS605")["GS605"].outcome is Outcome.CLEAR

    @pytest.mark.parametrize(
        ("num_inputs", "num_targets", "is_zero", "expected"),
        [
            (4, 0, False, Severity.ERROR),  # the head only pushes the row away
            (1, 12, False, Severity.WARNING),  # its row is trained as a target, far more than it is read
            (1, 12, True, Severity.ERROR),
        ],
    )
    def test_tied_table_by_what_the_row_loses(
        self, num_inputs: int, num_targets: int, is_zero: bool, expected: Severity
    ) -> None:
        given = hf(llama(tied=True))
        table = given["model"].get_input_embeddings().weight
        with torch.no_grad():
            table[0] = 0.0 if is_zero else table[1]
        for b in given["batches"]:
            b["input_ids"][b["input_ids"] == 0] = 3
            b["labels"] = b["input_ids"].clone()
            b["input_ids"][:num_inputs, 2] = 0
            b["labels"][:, -num_targets:] = 0 if num_targets else b["labels"]
        assert verdicts(given, "GS605")["GS605"].severity is expected


class TestGradMode:
    def test_left_off_before(self) -> None:
        torch.set_grad_enabled(False)
        try:
            found = verdicts(gru(), "GS6", "GS405")
            assert found["GS612"].severity is Severity.ERROR
            assert found["GS603"].outcome is Outcome.UNKNOWN
            assert not torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(True)

    def test_left_off_by_train_step(self) -> None:
        def step(model: Any, optimizer: Any, given: Any) -> float:
            torch.set_grad_enabled(True)
            optimizer.zero_grad()
            loss = gru_loss(model, given)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            torch.set_grad_enabled(False)
            gru_loss(model, given)
            return 0.0

        assert set(alarms(gru(train_step=step))) == {"GS612"}
        assert torch.is_grad_enabled()

    def test_no_grad_evaluation_is_silent(self) -> None:
        def step(model: Any, optimizer: Any, given: Any) -> float:
            optimizer.zero_grad()
            gru_loss(model, given).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with torch.no_grad():
                return float(gru_loss(model, given))

        assert alarms(gru(train_step=step)) == {}
