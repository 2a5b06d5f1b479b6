"""GS003 and GS010, each both ways."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ghoststep.checks.vocab.masked_classes_in_smoothing import masked_classes_in_smoothing
from ghoststep.checks.vocab.probability_on_padded_rows import probability_on_padded_rows
from ghoststep.evidence.base import Missing
from ghoststep.evidence.loss import ClassMass, LossKind
from ghoststep.registry import Answer, Clear, Found, NotApplicable
from tests.checks.label_builders import xray

NOTHING = Missing(reason="not there")


def mass(held: float, *, loss: float = math.log(50), without: int = 14, num_classes: int = 64, **more: Any) -> ClassMass:
    values: dict[str, Any] = {
        "num_classes": num_classes, "num_tokens": num_classes - without, "first_class": num_classes - without,
        "last_class": num_classes - 1, "num_without_token": without, "mass": held, "uniform_mass": without / num_classes,
        "top_class": num_classes - 2, "top_mass": held / 3, "mean_loss": loss - math.log1p(-held), "real_loss": loss,
        "num_positions": 100, **more,
    }  # fmt: skip
    return ClassMass(**values)


def judge(seen: ClassMass, by: Any = NOTHING) -> Answer:
    return probability_on_padded_rows(seen, by)


class TestProbabilityOnPaddedRows:
    def test_garbage_rows_hold_most_of_it(self) -> None:
        said = judge(mass(0.98, loss=0.1))
        assert isinstance(said, Found)
        assert "rows 50..63 (14 of 64) have no token" in said.findings[0].message
        assert said.findings[0].where.token_id == 62

    def test_a_fresh_model_gives_them_their_share_and_a_trained_one_nothing(self) -> None:
        assert isinstance(judge(mass(14 / 64)), Clear)
        assert isinstance(judge(mass(0.25)), Clear)
        assert isinstance(judge(mass(1e-4, loss=0.1)), Clear)

    def test_their_share_is_too_much_for_a_trained_model(self) -> None:
        assert isinstance(judge(mass(14 / 64, loss=1.0)), Found)
        assert isinstance(judge(mass(0.04, loss=1.0)), Clear)

    def test_garbage_in_a_fresh_model(self) -> None:
        assert isinstance(judge(mass(0.7, loss=math.log(50))), Found)

    def test_a_few_alignment_rows_of_a_large_table(self) -> None:
        assert isinstance(judge(mass(47 / 50304, loss=10.8, without=47, num_classes=50304)), Clear)
        assert isinstance(judge(mass(0.3, loss=3.0, without=47, num_classes=50304)), Found)

    def test_masked_before_the_loss_or_none_at_all(self) -> None:
        assert isinstance(judge(mass(0.9, loss=1.0), xray(masked_classes=14, first_masked_class=50)), Clear)
        assert isinstance(judge(mass(0.9, loss=1.0), xray(masked_classes=1, first_masked_class=63)), Found)
        assert isinstance(judge(mass(0.0, without=0)), NotApplicable)

    def test_an_unknown_loss_counts_as_untrained(self) -> None:
        assert isinstance(judge(mass(14 / 64, real_loss=math.nan, mean_loss=math.nan)), Clear)


class TestMaskedClassesInSmoothing:
    def test_mass_on_masked_classes(self) -> None:
        seen = xray(masked_classes=4, first_masked_class=60, smoothing_on_masked=0.00625, loss=math.inf, kind=LossKind.SMOOTHED)
        said = masked_classes_in_smoothing(seen)
        assert isinstance(said, Found)
        assert "0.62% of the target on 4 classes" in said.findings[0].message
        assert "the loss is inf" in said.findings[0].message
        assert said.findings[0].measured is not None
        assert said.findings[0].measured.value == pytest.approx(0.00625)

    def test_masked_without_mass_and_no_masks(self) -> None:
        assert isinstance(masked_classes_in_smoothing(xray(masked_classes=4, first_masked_class=60)), Clear)
        assert isinstance(masked_classes_in_smoothing(xray()), NotApplicable)
