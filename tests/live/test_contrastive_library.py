"""The losses of sentence-transformers on a tiny encoder. Needs the package, which the project does not install, or skips."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from ghoststep.engine import Case
from ghoststep.evidence.base import Missing
from ghoststep.evidence.contrastive import ContrastiveForm, ContrastiveXray
from ghoststep.finding import Outcome
from ghoststep.subjects.setup import make_setup

from .training_setups import alarms, registry, verdicts

st = pytest.importorskip("sentence_transformers")
losses = pytest.importorskip("sentence_transformers.losses")
parts = pytest.importorskip("sentence_transformers.models")
NUM = 8


class Words(nn.Module):
    """In place of a Transformer module: token embeddings, mixed by one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(300, 32)
        self.mix = nn.Linear(32, 32)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features.update({"token_embeddings": self.mix(self.table(features["input_ids"])).tanh()})
        return features


def encoder() -> Any:
    return st.SentenceTransformer(modules=[Words(), parts.Pooling(32), parts.Normalize()], device="cpu")


def column(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(4, 9, (NUM, 1), generator=g)
    mask = (torch.arange(9) < length).long()
    return {"input_ids": torch.randint(3, 300, (NUM, 9), generator=g) * mask, "attention_mask": mask}


def setup(make: Any, columns: tuple[str, ...] = ("anchor", "positive"), labels: Any = None) -> dict[str, Any]:
    model = encoder()
    loss = make(model)

    def run(_: Any, batch: Any) -> torch.Tensor:
        value: torch.Tensor = loss([dict(batch[c]) for c in columns], labels)
        return value

    given = {name: column(i) for i, name in enumerate(("anchor", "positive", "negative"))}
    return {"model": model, "batch": given, "loss_fn": run, "pad_token_id": 0}


def fact(given: dict[str, Any]) -> ContrastiveXray | Missing:
    found = Case([make_setup(given)], registry().instruments).fact(ContrastiveXray)
    assert isinstance(found, (ContrastiveXray, Missing))
    return found


def xray(given: dict[str, Any]) -> ContrastiveXray:
    found = fact(given)
    assert isinstance(found, ContrastiveXray), found
    return found


@pytest.mark.parametrize(
    ("name", "columns", "symmetric", "negatives"),
    [
        ("MultipleNegativesRankingLoss", ("anchor", "positive"), False, NUM - 1),
        ("MultipleNegativesRankingLoss", ("anchor", "positive", "negative"), False, 2 * NUM - 1),
        ("MultipleNegativesSymmetricRankingLoss", ("anchor", "positive"), True, NUM - 1),
    ],
)
def test_ranking(name: str, columns: tuple[str, ...], symmetric: bool, negatives: int) -> None:
    given = setup(getattr(losses, name), columns)
    found = xray(given)
    assert found.form is ContrastiveForm.SOFTMAX
    assert found.scale == pytest.approx(20, rel=1e-4)
    assert found.residual < 1e-4
    assert found.is_symmetric is symmetric
    assert found.anchors[0].positives == (NUM,)
    assert found.anchors[0].num_negatives == negatives
    assert alarms(given, "GS11", "GS2", "GS5") == {}
    assert all("sentence_embedding" not in c for c in given["batch"].values())


def test_a_scale_of_one_and_a_duplicate_are_found() -> None:
    given = setup(lambda model: losses.MultipleNegativesRankingLoss(model, scale=1.0))
    assert set(alarms(given, "GS5")) == {"GS507"}
    given = setup(losses.MultipleNegativesRankingLoss)
    for part in given["batch"]["positive"].values():
        part[5] = part[2]
    assert set(alarms(given, "GS5")) == {"GS508"}


def test_positives_of_other_examples_are_found() -> None:
    class Shifted(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.loss = losses.MultipleNegativesRankingLoss(model)

        def forward(self, features: list[dict[str, Any]], labels: Any) -> torch.Tensor:
            anchor, positive = ({k: v.roll(i, 0) for k, v in f.items()} for i, f in enumerate(features))
            value: torch.Tensor = self.loss([anchor, positive], labels)
            return value

    assert set(alarms(setup(Shifted), "GS5")) == {"GS510"}


@pytest.mark.parametrize(
    ("name", "columns", "labels"),
    [
        ("TripletLoss", ("anchor", "positive", "negative"), None),
        ("CosineSimilarityLoss", ("anchor", "positive"), torch.linspace(0.1, 0.9, NUM)),
        ("ContrastiveLoss", ("anchor", "positive"), torch.arange(NUM) % 2),
    ],
)
def test_other_losses_are_not_called_a_softmax(name: str, columns: tuple[str, ...], labels: Any) -> None:
    given = setup(getattr(losses, name), columns, labels)
    found = xray(given)
    assert found.form in (ContrastiveForm.PAIRS, ContrastiveForm.MARGIN)
    assert math.isnan(found.scale)
    assert alarms(given, "GS11", "GS2", "GS5") == {}


def test_a_gradient_cache_is_unknown() -> None:
    given = setup(lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4))
    found = fact(given)
    assert isinstance(found, Missing)
    assert found.outcome is Outcome.UNKNOWN
    assert {v.outcome for v in verdicts(given, "GS507", "GS508", "GS510").values()} == {Outcome.UNKNOWN}
