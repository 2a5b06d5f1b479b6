"""The contrastive X-ray against its slow twin: the loss's own similarities by explicit autograd; and GS508, GS510 both ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghoststep.engine import Case
from ghoststep.evidence.base import Missing
from ghoststep.evidence.contrastive import ContrastiveForm, ContrastiveXray
from ghoststep.evidence.loss import LossKind
from ghoststep.finding import Outcome, Severity
from ghoststep.subjects.setup import make_setup

from .training_setups import alarms, gru, registry, same, snapshot, verdicts

NUM, DIMS = 8, 20
Similarity = Callable[[torch.Tensor], torch.Tensor]


class Encoder(nn.Module):
    """One tower with a projection; returns a tensor."""

    def __init__(self, *, normalise: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.normalise = normalise
        self.table = nn.Embedding(300, 24)
        self.drop = nn.Dropout(0.1)
        self.project = nn.Linear(24, DIMS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        z = self.project(self.drop(self.table(ids)).tanh().mean(1))
        return functional.normalize(z, dim=-1) if self.normalise else z


def texts(seed: int, length: int = 6) -> torch.Tensor:
    return torch.randint(0, 300, (NUM, length), generator=torch.Generator().manual_seed(seed))


def batch(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": texts(0), "p": texts(1), "n": texts(2), **more}


def setup(loss: Any, *, model: nn.Module | None = None, **more: Any) -> dict[str, Any]:
    return {"model": Encoder() if model is None else model, "batch": batch(**more), "loss_fn": loss}


def xray(given: dict[str, Any]) -> ContrastiveXray:
    found = Case([make_setup(given)], registry().instruments).fact(ContrastiveXray)
    assert isinstance(found, ContrastiveXray), found
    return found


def target(num: int) -> torch.Tensor:
    return torch.arange(num)


# The losses as functions of the similarities of all embeddings [N, N]; anchors come first, then positives, then negatives.
def one_way(s: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(20 * s[:NUM, NUM : 2 * NUM], target(NUM))


def two_ways(s: torch.Tensor) -> torch.Tensor:
    logits = 14.3 * s[:NUM, NUM : 2 * NUM]
    return (functional.cross_entropy(logits, target(NUM)) + functional.cross_entropy(logits.T, target(NUM))) / 2


def hard_negatives(s: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(20 * s[:NUM, NUM : 3 * NUM], target(NUM))


def summed(s: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(5 * s[:NUM, NUM : 2 * NUM], target(NUM), reduction="sum")


def all_against_all(s: torch.Tensor) -> torch.Tensor:
    logits = (s[: 2 * NUM, : 2 * NUM] / 0.05).masked_fill(torch.eye(2 * NUM, dtype=torch.bool), -1e9)
    return functional.cross_entropy(logits, (target(2 * NUM) + NUM) % (2 * NUM))


def twice_tempered(s: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(s[:NUM, NUM : 2 * NUM] / 0.07 / 0.07, target(NUM))


def sigmoid(s: torch.Tensor) -> torch.Tensor:
    logits = 10 * s[:NUM, NUM : 2 * NUM] - 10
    return -functional.logsigmoid(logits * (2 * torch.eye(NUM, dtype=s.dtype) - 1)).sum() / NUM


def of_similarities(loss: Similarity, num_calls: int = 2) -> Any:
    def run(model: Any, given: Any) -> torch.Tensor:
        z = torch.cat([model(given[k]) for k in ("a", "p", "n")[:num_calls]])
        return loss(z @ z.T)

    return run


def twin_pulls(loss: Similarity, num: int) -> torch.Tensor:
    """d loss / d similarity of each pair at similarity 0, from the definition, both halves of the matrix together."""
    s = torch.zeros(num, num, dtype=torch.float64, requires_grad=True)
    (pull,) = torch.autograd.grad(loss(s), s)
    return (pull + pull.T).fill_diagonal_(0)


CASES = [
    (one_way, 2, 20.0, False, NUM, 1 / NUM),
    (two_ways, 2, 14.3, True, 2 * NUM, 0.5 / NUM),
    (hard_negatives, 3, 20.0, False, NUM, 1 / NUM),
    (summed, 2, 5.0, False, NUM, 1.0),
    (all_against_all, 2, 20.0, True, 2 * NUM, 0.5 / NUM),
    (twice_tempered, 2, 1 / 0.07**2, False, NUM, 1 / NUM),
]


class TestTwin:
    @pytest.mark.parametrize(("loss", "calls", "scale", "symmetric", "anchors", "weight"), CASES)
    def test_softmax(self, loss: Similarity, calls: int, scale: float, symmetric: bool, anchors: int, weight: float) -> None:
        given = setup(of_similarities(loss, calls))
        before = snapshot(given)
        found = xray(given)
        assert same(before, snapshot(given))
        twin = twin_pulls(loss, calls * NUM)
        torch.testing.assert_close(torch.from_numpy(found.pull_NN), twin, rtol=1e-5, atol=1e-9)
        assert found.form is ContrastiveForm.SOFTMAX
        assert found.kind is LossKind.CONTRASTIVE
        assert found.scale == pytest.approx(scale, rel=1e-4)
        assert found.residual < 1e-4
        assert found.is_symmetric is symmetric
        assert len(found.anchors) == anchors
        assert all(a.positives == ((a.index + NUM) % (2 * NUM),) for a in found.anchors)
        assert [a.weight for a in found.anchors] == pytest.approx([weight] * anchors, rel=1e-4)

    def test_pairs_on_their_own(self) -> None:
        found = xray(setup(of_similarities(sigmoid)))
        torch.testing.assert_close(torch.from_numpy(found.pull_NN), twin_pulls(sigmoid, 2 * NUM), rtol=1e-5, atol=1e-9)
        assert found.form is ContrastiveForm.PAIRS
        assert math.isnan(found.scale)

    def test_one_call_of_joined_halves_and_normalised_inside(self) -> None:
        def loss(model: Any, given: Any) -> torch.Tensor:
            a, p = functional.normalize(model(torch.cat([given["a"], given["p"]])), dim=-1).chunk(2)
            return functional.cross_entropy(a @ p.T / 0.05, target(NUM))

        found = xray(setup(loss, model=Encoder(normalise=False)))
        assert found.places == (("the model", 2 * NUM),)
        assert found.is_cosine
        assert found.scale == pytest.approx(20, rel=1e-4)

    def test_keys_without_gradient(self) -> None:
        def loss(model: Any, given: Any) -> torch.Tensor:
            a = model(given["a"])
            with torch.no_grad():
                p = model(given["p"])
            return functional.cross_entropy(20 * a @ p.T, target(NUM))

        found = xray(setup(loss))
        assert found.form is ContrastiveForm.SOFTMAX
        assert [a.index for a in found.anchors] == list(range(NUM))
        assert found.scale == pytest.approx(20, rel=1e-4)

    def test_several_positives(self) -> None:
        def loss(model: Any, given: Any) -> torch.Tensor:
            z = model(given["a"])
            itself = torch.eye(NUM, dtype=torch.bool)
            log_p = (14.3 * z @ z.T).masked_fill(itself, -1e9).log_softmax(1)
            positive = (target(NUM)[:, None] // 4 == target(NUM) // 4) & ~itself
            value: torch.Tensor = -((log_p * positive).sum(1) / positive.sum(1)).mean()
            return value

        found = xray(setup(loss))
        assert found.form is ContrastiveForm.SOFTMAX
        assert found.anchors[0].positives == (1, 2, 3)
        assert found.scale == pytest.approx(14.3, rel=1e-4)

    def test_compared_by_a_module_behind_the_encoder_and_inside_the_models_forward(self) -> None:
        class Compare(nn.Module):
            def forward(self, a: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
                return 20 * a @ p.T

        class Pair(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.encoder, self.compare, self.criterion = Encoder(), Compare(), nn.CrossEntropyLoss()

            def forward(self, a: torch.Tensor, p: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": self.criterion(self.compare(self.encoder(a), self.encoder(p)), target(len(a)))}

        found = xray({"model": Pair(), "batch": batch()})
        assert [name for name, _ in found.places] == ["encoder", "encoder"]
        assert found.scale == pytest.approx(20, rel=1e-4)

    def test_clip(self) -> None:
        from transformers import CLIPConfig, CLIPModel

        torch.manual_seed(0)
        small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        config = CLIPConfig(
            text_config={**small, "vocab_size": 300, "eos_token_id": 2}, vision_config={**small, "image_size": 16, "patch_size": 8},
            projection_dim=24,
        )  # fmt: skip
        given = {"input_ids": texts(0), "pixel_values": torch.randn(NUM, 3, 16, 16), "return_loss": True}
        found = xray({"model": CLIPModel(config), "batch": given})
        assert found.is_symmetric
        assert found.scale == pytest.approx(math.exp(2.6592), rel=1e-4)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype: torch.dtype) -> None:
        assert xray(setup(of_similarities(one_way), model=Encoder().to(dtype))).scale == pytest.approx(20, rel=1e-4)


class TestOtherLosses:
    def test_smoothed_and_with_a_margin(self) -> None:
        def smoothed(s: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(20 * s[:NUM, NUM : 2 * NUM], target(NUM), label_smoothing=0.1)

        def margin(s: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(20 * (s[:NUM, NUM : 2 * NUM] - 0.2 * torch.eye(NUM, dtype=s.dtype)), target(NUM))

        for loss in (smoothed, margin):
            given = setup(of_similarities(loss))
            found = xray(given)
            assert found.form is ContrastiveForm.COUPLED
            assert [a.positives for a in found.anchors] == [(i + NUM,) for i in range(NUM)]
            assert math.isnan(found.scale)
            assert alarms(given, "GS2", "GS5") == {}
            given["batch"]["p"][5] = given["batch"]["p"][2]
            assert set(alarms(given, "GS5")) == {"GS508"}

    def test_margins(self) -> None:
        def in_batch(model: Any, given: Any) -> torch.Tensor:
            s = model(given["a"]) @ model(given["p"]).T
            value: torch.Tensor = (0.3 - s.diag()[:, None] + s).relu().masked_fill(torch.eye(NUM, dtype=torch.bool), 0).mean()
            return value

        def triplet(model: Any, given: Any) -> torch.Tensor:
            return functional.triplet_margin_loss(*(model(given[k]) for k in ("a", "p", "n")))

        assert xray(setup(in_batch)).form is ContrastiveForm.MARGIN
        found = xray(setup(triplet))
        assert found.form is ContrastiveForm.PAIRS
        assert found.pull_NN[0, NUM] < 0 < found.pull_NN[0, 2 * NUM]
        assert alarms(setup(triplet)) == {}

    def test_regression_of_cosines(self) -> None:
        def loss(model: Any, given: Any) -> torch.Tensor:
            value: torch.Tensor = (
                (functional.cosine_similarity(model(given["a"]), model(given["p"])) - given["y"]).square().mean()
            )
            return value

        assert xray(setup(loss, y=torch.linspace(0.1, 1, NUM))).form is ContrastiveForm.PAIRS
        assert alarms(setup(loss, y=torch.linspace(0.1, 1, NUM))) == {}

    def test_losses_of_dimensions_are_not_read_as_pairs(self) -> None:
        def decorrelation(model: Any, given: Any) -> torch.Tensor:
            a, p = model(given["a"]), model(given["p"])
            c = (a - a.mean(0)).T @ (p - p.mean(0)) / NUM
            value: torch.Tensor = ((c - torch.eye(len(c))) ** 2 * (0.01 + torch.eye(len(c)))).sum()
            return value

        found = xray(setup(decorrelation))
        assert found.form is ContrastiveForm.OTHER
        assert found.kind is LossKind.OTHER
        assert verdicts(setup(decorrelation), "GS510")["GS510"].outcome is Outcome.UNKNOWN

    def test_no_comparison(self) -> None:
        class Classifier(Encoder):
            def __init__(self) -> None:
                super().__init__()
                self.classes = nn.Linear(DIMS, 3)

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                z: torch.Tensor = self.classes(super().forward(ids))
                return z

        def classify(model: Any, given: Any) -> torch.Tensor:
            return functional.cross_entropy(model(given["a"]), target(NUM) % 3)

        for given in (gru(), setup(classify, model=Classifier())):
            found = Case([make_setup(given)], registry().instruments).fact(ContrastiveXray)
            assert isinstance(found, Missing)
            assert found.outcome is Outcome.NOT_APPLICABLE

    def test_a_graph_that_is_cut_is_unknown(self) -> None:
        def cached(model: Any, given: Any) -> torch.Tensor:
            z = torch.cat([model(given["a"]), model(given["p"])]).detach().requires_grad_()
            return one_way(z @ z.T)

        found = Case([make_setup(setup(cached))], registry().instruments).fact(ContrastiveXray)
        assert isinstance(found, Missing)
        assert found.outcome is Outcome.UNKNOWN

    def test_label_checks_do_not_apply(self) -> None:
        found = verdicts(setup(of_similarities(one_way)), "GS201", "GS203", "GS204", "GS205", "GS207", "GS208")
        assert {v.outcome for v in found.values()} == {Outcome.NOT_APPLICABLE}
        assert "softmax over candidates" in (found["GS201"].reason or "")


def joined(pairs: str) -> Any:
    """Pairs [B, 2, T] flattened one after another, and split as `pairs` says."""

    def loss(model: Any, given: Any) -> torch.Tensor:
        z = model(given["both"].flatten(0, 1))
        a, p = z.chunk(2) if pairs == "halves" else (z[0::2], z[1::2])
        return functional.cross_entropy(20 * a @ p.T, target(NUM))

    return loss


def shifted(model: Any, given: Any) -> torch.Tensor:
    return functional.cross_entropy(20 * model(given["a"]) @ model(given["p"]).T, target(NUM).roll(1))


def labelled(model: Any, given: Any) -> torch.Tensor:
    return functional.cross_entropy(20 * model(given["a"]) @ model(given["p"]).T, given["y"])


class TestMisalignedPositives:
    @pytest.mark.parametrize("loss", [joined("halves"), shifted])
    def test_found(self, loss: Any) -> None:
        given = setup(loss, both=torch.stack([texts(0), texts(1)], 1))
        found = verdicts(given, "GS510")["GS510"]
        assert found.severity is Severity.ERROR
        assert f"{NUM} of {NUM} anchors" in found.findings[0].message

    @pytest.mark.parametrize("roll", [0, 1])
    def test_a_usual_scale_is_not_blamed_for_wrong_targets(self, roll: int) -> None:
        def loss(model: Any, given: Any) -> torch.Tensor:
            logits = 14.3 * model(given["a"]) @ model(given["p"]).T
            target = torch.arange(len(logits)).roll(roll)
            return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)) / 2

        found = verdicts(setup(loss), "GS507", "GS510")
        if roll == 0:
            assert {v.outcome for v in found.values()} == {Outcome.CLEAR}
        else:
            assert found["GS510"].severity is Severity.ERROR
            assert found["GS507"].outcome is Outcome.UNKNOWN
            assert "the targets are wrong" in str(found["GS507"].reason)
            assert "2.66" not in str(found["GS507"].reason)

    def test_a_capped_scale_beside_wrong_targets_is_their_symptom(self) -> None:
        assert "capped-logit-scale" in registry().find("GS510").explains_anywhere

    def test_triplets_of_other_examples(self) -> None:
        def loss(model: Any, given: Any) -> torch.Tensor:
            return functional.triplet_margin_loss(model(given["a"]), model(given["p"]).roll(1, 0), model(given["n"]))

        assert verdicts(setup(loss), "GS510")["GS510"].outcome is Outcome.FOUND

    @pytest.mark.parametrize(
        ("loss", "more"),
        [
            (joined("alternating"), {}),
            (of_similarities(hard_negatives, 3), {}),
            (of_similarities(two_ways), {}),
            (labelled, {"y": torch.tensor([3, 1, 4, 0, 5, 2, 7, 6])}),
            (labelled, {"y": torch.arange(NUM)}),
        ],
    )
    def test_silent(self, loss: Any, more: dict[str, Any]) -> None:
        given = setup(loss, both=torch.stack([texts(0), texts(1)], 1), **more)
        assert verdicts(given, "GS510")["GS510"].outcome is Outcome.CLEAR
        assert alarms(given, "GS5") == {}

    def test_equal_texts_and_classes_are_silent(self) -> None:
        def by_class(model: Any, given: Any) -> torch.Tensor:
            s = 20 * model(given["a"]) @ model(given["p"]).T
            other = (given["y"][:, None] == given["y"]) & ~torch.eye(NUM, dtype=torch.bool)
            value: torch.Tensor = -(s.log_softmax(1) * other).sum(1).div(other.sum(1)).mean()
            return value

        assert verdicts(setup(by_class, y=torch.arange(NUM) // 2), "GS510")["GS510"].outcome is Outcome.CLEAR
        same_text = setup(shifted)
        same_text["batch"]["p"] = same_text["batch"]["p"][:1].repeat(NUM, 1)
        assert verdicts(same_text, "GS510")["GS510"].outcome is Outcome.CLEAR

    def test_one_column_has_no_partners(self) -> None:
        def neighbours(model: Any, given: Any) -> torch.Tensor:
            z = model(given["a"])
            s = (20 * z @ z.T).masked_fill(torch.eye(NUM, dtype=torch.bool), -1e9)
            return functional.cross_entropy(s, target(NUM) ^ 1)

        given = {"model": Encoder(), "batch": {"a": texts(0)}, "loss_fn": neighbours}
        assert verdicts(given, "GS510")["GS510"].outcome is Outcome.NOT_APPLICABLE

    def test_few_examples_are_unknown(self) -> None:
        def loss(model: Any, given: Any) -> torch.Tensor:
            return functional.cross_entropy(20 * model(given["a"]) @ model(given["p"]).T, torch.tensor([1, 2, 0]))

        given = {"model": Encoder(), "batch": {"a": texts(0)[:3], "p": texts(1)[:3]}, "loss_fn": loss}
        assert verdicts(given, "GS510")["GS510"].outcome is Outcome.UNKNOWN
