"""Contrastive losses driven with chosen embeddings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghoststep.engine import Case
from ghoststep.evidence.base import Missing
from ghoststep.evidence.training import ContrastiveProbe
from ghoststep.finding import Outcome, Severity
from ghoststep.subjects.setup import make_setup

from .training_setups import alarms, gru, registry, same, snapshot, verdicts


class Encoder(nn.Module):
    """One tower that returns a dict and is called once a column."""

    def __init__(self, *, normalise: bool = True, vocab: int = 300, dims: int = 24) -> None:
        super().__init__()
        self.normalise = normalise
        self.table = nn.Embedding(vocab, dims)
        self.mix = nn.Linear(dims, dims)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        pooled = self.mix(self.table(ids).mean(1))
        return {"sentence_embedding": functional.normalize(pooled, dim=-1) if self.normalise else pooled}


def info_nce(scale: float, *, symmetric: bool = False) -> Any:
    def loss(model: Any, given: Any) -> torch.Tensor:
        a, p = model(given["a"])["sentence_embedding"], model(given["p"])["sentence_embedding"]
        logits = scale * a @ p.T
        target = torch.arange(len(a))
        one = functional.cross_entropy(logits, target)
        return (one + functional.cross_entropy(logits.T, target)) / 2 if symmetric else one

    return loss


def columns(num: int = 16, *, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randint(0, 300, (num, 5), generator=g), "p": torch.randint(0, 300, (num, 7), generator=g)}


def setup(loss: Any, *, model: nn.Module | None = None, batch: Any = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = model or Encoder()
    return {
        "model": model,
        "batch": batch or columns(),
        "loss_fn": loss,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
    }


class TestFloor:
    @pytest.mark.parametrize("symmetric", [False, True])
    def test_scale_one_is_found(self, symmetric: bool) -> None:
        given = setup(info_nce(1.0, symmetric=symmetric))
        before = snapshot(given)
        found = alarms(given)
        assert set(found) == {"GS507"}
        assert "(1)" in found["GS507"]
        assert same(before, snapshot(given))

    @pytest.mark.parametrize("scale", [10.0, 14.3, 100.0])
    def test_usual_scales_are_silent(self, scale: float) -> None:
        assert alarms(setup(info_nce(scale))) == {}

    def test_figures_against_the_formula(self) -> None:
        # 16 embeddings in 24 dimensions form a simplex: cosine 1 and -1/15.
        found = Case([make_setup(setup(info_nce(2.0)))], registry().instruments).fact(ContrastiveProbe)
        assert isinstance(found, ContrastiveProbe)
        assert found.floor == pytest.approx(math.log(1 + 15 * math.exp(-2.0 * (1 + 1 / 15))), rel=1e-4)
        assert found.collapsed == pytest.approx(math.log(16), rel=1e-5)
        assert found.scale == pytest.approx(2.0, rel=1e-3)

    def test_dot_products_are_silent(self) -> None:
        assert alarms(setup(info_nce(1.0), model=Encoder(normalise=False))) == {}

    def test_normalised_inside_the_loss_is_found(self) -> None:
        def loss(model: Any, given: Any) -> torch.Tensor:
            a = functional.normalize(model(given["a"])["sentence_embedding"], dim=-1)
            p = functional.normalize(model(given["p"])["sentence_embedding"], dim=-1)
            return functional.cross_entropy(a @ p.T, torch.arange(len(a)))

        assert set(alarms(setup(loss, model=Encoder(normalise=False)))) == {"GS507"}

    def test_sigmoid_loss_with_bias_is_silent(self) -> None:
        def loss(model: Any, given: Any) -> torch.Tensor:
            a, p = model(given["a"])["sentence_embedding"], model(given["p"])["sentence_embedding"]
            logits = 10.0 * a @ p.T - 10.0
            return -functional.logsigmoid(logits * (2 * torch.eye(len(a)) - 1)).sum() / len(a)

        assert alarms(setup(loss)) == {}

    def test_a_soft_fixed_temperature_is_a_note_and_a_soft_learnable_one_an_error(self) -> None:
        assert verdicts(setup(info_nce(2.0)), "GS507")["GS507"].severity is Severity.NOTE
        model = Encoder()
        model.log_scale = nn.Parameter(torch.tensor(math.log(2.0)))

        def loss(model: Any, given: Any) -> torch.Tensor:
            return info_nce(1.0 * model.log_scale.exp())(model, given)  # type: ignore[no-any-return]

        assert verdicts(setup(loss, model=model), "GS507")["GS507"].severity is Severity.ERROR

    def test_several_positives_leave_a_floor_of_their_own(self) -> None:
        def loss(model: Any, given: Any) -> torch.Tensor:
            z = model(given["a"])["sentence_embedding"]
            itself = torch.eye(len(z), dtype=torch.bool)
            log_p = (14.3 * z @ z.T).masked_fill(itself, -1e9).log_softmax(1)
            positive = (torch.arange(len(z))[:, None] // 4 == torch.arange(len(z)) // 4) & ~itself
            value: torch.Tensor = -((log_p * positive).sum(1) / positive.sum(1)).mean()
            return value

        assert alarms(setup(loss)) == {}

    def test_hidden_states_pooled_inside_the_loss(self) -> None:
        class Tokens(Encoder):
            def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
                hidden = self.mix(self.table(ids))
                return {"last_hidden_state": hidden, "pooler_output": torch.tanh(hidden[:, 0])}

        def loss(scale: float) -> Any:
            def run(model: Any, given: Any) -> torch.Tensor:
                a, p = (functional.normalize(model(given[k])["last_hidden_state"].mean(1), dim=-1) for k in ("a", "p"))
                return functional.cross_entropy(scale * a @ p.T, torch.arange(len(a)))

            return run

        assert alarms(setup(loss(20.0), model=Tokens())) == {}
        found = alarms(setup(loss(1.0), model=Tokens()))
        assert set(found) == {"GS507"}
        batch = columns()
        batch["p"][5] = batch["p"][2]
        assert verdicts(setup(loss(20.0), model=Tokens(), batch=batch), "GS508")["GS508"].severity is Severity.WARNING

    def test_few_examples_are_unknown(self) -> None:
        found = verdicts(setup(info_nce(1.0), batch=columns(4)), "GS507")["GS507"]
        assert found.outcome is Outcome.UNKNOWN

    def test_other_losses_do_not_apply(self) -> None:
        def regression(model: Any, given: Any) -> torch.Tensor:
            value: torch.Tensor = (model(given["a"])["sentence_embedding"] - 1).square().mean()
            return value

        for given in (gru(), setup(regression)):
            found = Case([make_setup(given)], registry().instruments).fact(ContrastiveProbe)
            assert isinstance(found, Missing)
            assert found.outcome is Outcome.NOT_APPLICABLE


class TestDuplicates:
    def test_equal_positives(self) -> None:
        batch = columns()
        batch["p"][5] = batch["p"][2]
        found = verdicts(setup(info_nce(20.0), batch=batch), "GS508")["GS508"]
        assert found.severity is Severity.WARNING
        assert "2 of 16 examples" in found.findings[0].message

    def test_most_examples(self) -> None:
        batch = columns()
        batch["p"] = batch["p"][torch.arange(16) // 2]
        assert verdicts(setup(info_nce(20.0), batch=batch), "GS508")["GS508"].severity is Severity.ERROR

    def test_masked_duplicates_are_silent(self) -> None:
        def loss(model: Any, given: Any) -> torch.Tensor:
            a, p = model(given["a"])["sentence_embedding"], model(given["p"])["sentence_embedding"]
            equal = (given["p"][:, None] == given["p"][None]).all(-1) & ~torch.eye(len(a), dtype=torch.bool)
            return functional.cross_entropy((20 * a @ p.T).masked_fill(equal, float("-inf")), torch.arange(len(a)))

        batch = columns()
        batch["p"][5] = batch["p"][2]
        assert verdicts(setup(loss, batch=batch), "GS508")["GS508"].outcome is Outcome.CLEAR
        assert alarms(setup(loss, batch=batch)) == {}

    def test_own_positive_among_the_hard_negatives(self) -> None:
        def loss(model: Any, given: Any) -> torch.Tensor:
            a, p, n = (model(given[k])["sentence_embedding"] for k in ("a", "p", "n"))
            return functional.cross_entropy(20 * a @ torch.cat([p, n]).T, torch.arange(len(a)))

        batch = columns()
        batch["n"] = torch.randint(0, 300, (16, 7), generator=torch.Generator().manual_seed(5))
        assert alarms(setup(loss, batch=dict(batch))) == {}
        batch["n"][3] = batch["p"][3]
        found = verdicts(setup(loss, batch=batch), "GS508")["GS508"]
        assert found.findings[0].where.example == 3
