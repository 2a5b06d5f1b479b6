"""GS101 to GS111 on evidence built by hand, each both ways: the flaw found, the healthy twin and the near miss silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ghoststep.checks.mask.blind_context import blind_context
from ghoststep.checks.mask.documents_concatenated import documents_concatenated
from ghoststep.checks.mask.nothing_visible import nothing_visible
from ghoststep.checks.mask.order_blind import order_blind
from ghoststep.checks.mask.padding_side_changes_output import padding_side_changes_output
from ghoststep.checks.mask.pooled_padding import pooled_padding
from ghoststep.checks.mask.pooled_wrong_token import pooled_wrong_token
from ghoststep.checks.mask.visible_batch_example import visible_batch_example
from ghoststep.checks.mask.visible_future import visible_future
from ghoststep.checks.mask.visible_neighbour_document import visible_neighbour_document
from ghoststep.checks.mask.visible_padding import visible_padding
from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.equivalence import Equivalence, PooledExample, Pooling, Variant, VariantReading
from ghoststep.evidence.influence import CausalIntent, Influence, Reading, Region
from ghoststep.finding import Finding, Severity
from ghoststep.registry import Answer, Clear, Found, NotApplicable, Unknown

ALONE = Missing(reason="no other order of the batch was run")
CAUSAL = CausalIntent(causal=True, source="8 of 8 trained positions are to predict the next token")


def reading(region: Region, relative: float, *, method: str = "swap", target: tuple[int, int] = (0, 3)) -> Reading:
    return Reading(
        region=region, relative=relative, absolute=relative / 10, source=(0, 5), target=target, num_pairs=9,
        num_above=int(relative > 0), method=method, mode="train",
    )  # fmt: skip


def influence(swap: float = 0.0, gradient: float = 0.0, region: Region = Region.FUTURE, **more: Any) -> Influence:
    """Both readings of one region; the past was seen."""
    swaps = {Region.PAST: reading(Region.PAST, 1.0), region: reading(region, swap)}
    gradients = {
        Region.PAST: reading(Region.PAST, 1.0, method="gradient"),
        region: reading(region, gradient, method="gradient"),
    }
    is_future = region is Region.FUTURE
    values: dict[str, Any] = {
        "matrix_ST": np.full((8, 8), np.nan), "matrix_example": 0, "readings": swaps, "gradient_readings": gradients,
        "trained_future": swaps[region] if is_future else reading(Region.FUTURE, 0.0),
        "trained_future_gradient": gradients[region] if is_future else None, "intent": CAUSAL, "floor": 1e-5, "past": 0.1,
        "num_past": 9, "near_past": (4, 4), "blind_example": None, "order_change": 0.2, "order_floor": 1e-5,
        "has_attention": True, "probes_perturbed": False, "nothing_visible": (), "is_causal_by_measure": True, "coupled": "",
        "against_order": False, "is_time_first": False, "encoder_padding": False, "mode": "train",
        "serial": False, "readout": "the input of head", "num_examples": 4,
        "num_forward": 8, "num_backward": 1,
    }  # fmt: skip
    return Influence(**{**values, **more})


def batch(**more: Any) -> BatchFacts:
    padding = np.zeros((4, 8), dtype=bool)
    padding[1:, 6:] = True
    values: dict[str, Any] = {
        "ids_BT": np.ones((4, 8), dtype=np.int64), "padding_BT": padding, "padding_source": "attention_mask",
        "document_BT": None, "document_source": "no boundary", "labels_BT": None, "sides": "right", "has_attention_mask": True,
        "has_position_ids": False,
    }  # fmt: skip
    return BatchFacts(**{**values, **more})


def only(said: Answer) -> Finding:
    assert isinstance(said, Found), said
    assert len(said.findings) == 1
    return said.findings[0]


class TestVisibleFuture:
    @pytest.mark.parametrize(
        ("swap", "gradient", "severity"),
        [
            (1.1e-3, 0.0, Severity.ERROR),
            (0.0, 1.1e-3, Severity.ERROR),
            (1.1e-5, 0.0, Severity.WARNING),
            (0.0, 1.1e-6, Severity.WARNING),
        ],
    )
    def test_thresholds(self, swap: float, gradient: float, severity: Severity) -> None:
        finding = only(visible_future(influence(swap, gradient)))
        assert finding.severity is severity
        assert (finding.where.example, finding.where.position) == (0, 3)
        assert CAUSAL.source in finding.message

    def test_below_both_it_is_clear_with_its_power(self) -> None:
        said = visible_future(influence(0.9e-5, 0.9e-6))
        assert isinstance(said, Clear)
        assert said.power is not None
        assert said.power.smallest_detectable == 1e-6

    def test_low_precision_needs_more(self) -> None:
        assert isinstance(visible_future(influence(1e-2, floor=2e-2)), Clear)
        assert only(visible_future(influence(3e-2, floor=2e-2))).severity is Severity.ERROR

    def test_a_discrete_path_is_named(self) -> None:
        assert "discrete choice" in only(visible_future(influence(0.5, 0.0))).message
        assert "discrete choice" not in only(visible_future(influence(0.5, 0.5))).message

    def test_without_power_it_is_unknown(self) -> None:
        assert isinstance(visible_future(influence(past=0.0, num_past=0)), Unknown)

    def test_routing_that_a_fast_run_could_not_probe_is_unknown(self) -> None:
        assert isinstance(visible_future(influence(choice_unprobed=True)), Unknown)
        assert isinstance(visible_future(influence()), Clear)

    def test_intent_decides(self) -> None:
        masked = CausalIntent(causal=False, source="the setup's intent is 'masked'")
        assert isinstance(visible_future(influence(1.0, intent=masked)), NotApplicable)
        open_ = CausalIntent(causal=None, source="nothing says")
        assert isinstance(visible_future(influence(1.0, intent=open_)), Unknown)
        assert isinstance(visible_future(influence(0.0, intent=open_)), Clear)

    def test_what_other_causes_carry_is_left_to_them(self) -> None:
        assert isinstance(visible_future(influence(1.0, coupled="continuous")), Unknown)
        assert isinstance(visible_future(influence(1.0, nothing_visible=((0, 2),))), Unknown)
        assert isinstance(visible_future(influence(1.0, nothing_visible=((0, 7),))), Found)
        assert isinstance(visible_future(influence(0.0, against_order=True)), Unknown)

    def test_no_future_to_look_at(self) -> None:
        said = visible_future(influence(trained_future=None, trained_future_gradient=None))
        assert isinstance(said, NotApplicable)


class TestVisiblePadding:
    def test_found_and_clear(self) -> None:
        finding = only(visible_padding(influence(0.1, region=Region.PADDING), batch()))
        assert finding.severity is Severity.ERROR
        assert "by attention_mask" in finding.message
        assert isinstance(visible_padding(influence(1e-6, region=Region.PADDING), batch()), Clear)

    def test_what_is_no_padding_does_not_apply(self) -> None:
        seen = influence(0.1, region=Region.PADDING)
        assert isinstance(visible_padding(seen, batch(padding_BT=None)), NotApplicable)
        assert isinstance(visible_padding(seen, batch(padding_BT=np.zeros((4, 8), dtype=bool))), NotApplicable)
        assert isinstance(visible_padding(influence(), batch()), NotApplicable)

    def test_without_power_it_is_unknown(self) -> None:
        said = visible_padding(influence(0.0, region=Region.PADDING, past=0.0, num_past=0), batch())
        assert isinstance(said, Unknown)


class TestBlindContext:
    def test_found_only_where_a_whole_example_is_blind(self) -> None:
        finding = only(blind_context(influence(near_past=(0, 4), blind_example=(2, 5))))
        assert (finding.where.example, finding.where.position) == (2, 5)
        assert isinstance(blind_context(influence(near_past=(3, 4), blind_example=None)), Clear)

    def test_a_position_wise_model_and_a_single_token_do_not_apply(self) -> None:
        assert isinstance(blind_context(influence(near_past=(0, 4), blind_example=(2, 5), has_attention=False)), NotApplicable)
        assert isinstance(blind_context(influence(near_past=(0, 0))), NotApplicable)


class TestVisibleNeighbourDocument:
    def test_found_and_clear(self) -> None:
        documents = batch(document_BT=np.repeat([[0, 0, 0, 0, 1, 1, 1, 1]], 4, axis=0), document_source="position_ids restart")
        finding = only(visible_neighbour_document(influence(0.1, region=Region.OTHER_DOCUMENT), documents))
        assert "leave it out" in finding.message.lower()
        assert isinstance(visible_neighbour_document(influence(0.0, region=Region.OTHER_DOCUMENT), documents), Clear)
        assert isinstance(visible_neighbour_document(influence(), batch()), NotApplicable)


class TestVisibleBatchExample:
    def test_continuous_is_an_error_and_discrete_a_note(self) -> None:
        shared = influence(0.1, 0.1, region=Region.OTHER_EXAMPLE, coupled="continuous")
        assert only(visible_batch_example(shared, ALONE)).severity is Severity.ERROR
        routed = influence(0.1, region=Region.OTHER_EXAMPLE, coupled="discrete")
        assert only(visible_batch_example(routed, ALONE)).severity is Severity.NOTE
        assert isinstance(visible_batch_example(influence(0.0, region=Region.OTHER_EXAMPLE), ALONE), Clear)

    def test_one_example_does_not_apply(self) -> None:
        assert isinstance(visible_batch_example(influence(num_examples=1), ALONE), NotApplicable)


class TestNothingVisible:
    def test_found_and_clear(self) -> None:
        finding = only(nothing_visible(influence(nothing_visible=((1, 4), (2, 4)))))
        assert (finding.where.example, finding.where.position) == (1, 4)
        assert isinstance(nothing_visible(influence()), Clear)
        assert isinstance(nothing_visible(influence(has_attention=False)), NotApplicable)


class TestOrderBlind:
    def test_found_at_rounding_and_clear_above(self) -> None:
        assert isinstance(order_blind(influence(order_change=1e-6)), Found)
        assert isinstance(order_blind(influence(order_change=2e-5)), Clear)

    def test_where_rounding_hides_it_it_is_unknown(self) -> None:
        assert isinstance(order_blind(influence(order_change=0.1, order_floor=0.2)), Unknown)
        assert isinstance(order_blind(influence(order_change=0.3, order_floor=0.2)), Clear)
        assert isinstance(order_blind(influence(order_change=None)), Unknown)
        assert isinstance(order_blind(influence(order_change=1e-6, has_attention=False)), NotApplicable)


class TestDocumentsConcatenated:
    def test_a_note_or_nothing(self) -> None:
        said = documents_concatenated(influence(separators=((1, 4),)))
        assert (only(said).where.example, only(said).where.position) == (1, 4)
        assert documents_concatenated.severity is Severity.NOTE
        assert isinstance(documents_concatenated(influence()), Clear)


def variant(kind: Variant, change: float, *, used_by: str = "", starts_move: bool = True) -> Equivalence:
    one = VariantReading(
        variant=kind, change=change, tolerance=1e-4, example=1, position=4, num_positions=9, num_above=int(change > 1e-4),
        starts_move=starts_move, used_by=used_by,
    )  # fmt: skip
    return Equivalence(readings=(one,), side="left", has_position_ids=False, num_forward=1.25)


class TestPaddingSide:
    @pytest.mark.parametrize(
        ("equivalence", "severity"),
        [
            (variant(Variant.AS_BATCHED, 0.4, used_by="the batch"), Severity.ERROR),
            (variant(Variant.AS_BATCHED, 5e-4, used_by="the batch"), Severity.WARNING),
            (variant(Variant.AS_BATCHED, 0.4, used_by="the batch", starts_move=False), Severity.NOTE),
            (variant(Variant.LEFT, 0.4, used_by="the tokenizer"), Severity.WARNING),
        ],
    )
    def test_severity_by_use(self, equivalence: Equivalence, severity: Severity) -> None:
        assert only(padding_side_changes_output(equivalence)).severity is severity

    def test_at_the_tolerance_it_is_clear(self) -> None:
        assert isinstance(padding_side_changes_output(variant(Variant.AS_BATCHED, 1e-4)), Clear)

    def test_a_side_that_nothing_uses_is_clear(self) -> None:
        assert isinstance(padding_side_changes_output(variant(Variant.LEFT, 0.4)), Clear)


def pooled(kind: str, num_padding: int, position: int = 7) -> Pooling:
    one = PooledExample(
        example=1, kind=kind, num_used=1 if kind == "single" else 8, num_padding=num_padding, position=position, first_real=0,
        last_real=5,
    )  # fmt: skip
    return Pooling(examples=(one,), num_examples=2, padding_source="attention_mask", num_forward=1)


class TestPooling:
    def test_padding_in_a_mean_or_maximum(self) -> None:
        assert "2 of the 8 positions" in only(pooled_padding(pooled("mean", 2))).message
        assert isinstance(pooled_padding(pooled("maximum", 2)), Found)
        assert isinstance(pooled_padding(pooled("mean", 0)), Clear)
        assert isinstance(pooled_padding(pooled("single", 1)), Clear)

    def test_the_wrong_single_token(self) -> None:
        assert "last real token stands at 5" in only(pooled_wrong_token(pooled("single", 1))).message
        assert isinstance(pooled_wrong_token(pooled("single", 0, 5)), Clear)
        assert isinstance(pooled_wrong_token(pooled("mean", 2)), Clear)

    def test_the_first_token_of_a_left_padded_text(self) -> None:
        left = pooled("single", 1, 0)
        left = replace(left, examples=(replace(left.examples[0], first_real=3, last_real=7),))
        assert "first real token stands at 3" in only(pooled_wrong_token(left)).message
