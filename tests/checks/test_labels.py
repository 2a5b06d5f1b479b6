"""GS201 to GS211, each both ways: the flaw found, the healthy twin and the near miss silent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ghoststep.checks.labels.bos_count import bos_count
from ghoststep.checks.labels.nothing_supervised import nothing_supervised
from ghoststep.checks.labels.padding_in_loss import padding_in_loss
from ghoststep.checks.labels.prompt_in_loss import prompt_in_loss
from ghoststep.checks.labels.target_across_documents import target_across_documents
from ghoststep.checks.labels.truncated_answers import truncated_answers
from ghoststep.checks.labels.twice_shifted_labels import twice_shifted_labels
from ghoststep.checks.labels.uneven_token_weight import uneven_token_weight
from ghoststep.checks.labels.unshifted_labels import unshifted_labels
from ghoststep.checks.labels.unsupervised_stop_token import unsupervised_stop_token
from ghoststep.checks.labels.visible_target import visible_target
from ghoststep.evidence.base import Missing
from ghoststep.evidence.loss import LossKind, WeightAcrossMicroBatches
from ghoststep.finding import Finding, Outcome, Severity
from ghoststep.registry import Answer, Clear, Found, NotApplicable, Unknown
from tests.checks.label_builders import IDS, batch, further, influence, right_padded, targets, xray

NOTHING = Missing(reason="not there", outcome=Outcome.NOT_APPLICABLE)


def only(said: Answer) -> Finding:
    assert isinstance(said, Found), said
    assert len(said.findings) == 1, said.findings
    return said.findings[0]


class TestUnshiftedLabels:
    def test_found_at_the_first_position(self) -> None:
        finding = only(unshifted_labels(xray(targets(shift=0)), batch(), influence()))
        assert (finding.where.example, finding.where.position, finding.where.token_id) == (0, 0, 10)
        assert "22 of 22 positions" in finding.message

    def test_shifted_once_or_twice_is_silent(self) -> None:
        for shift in (1, 2):
            assert isinstance(unshifted_labels(xray(targets(shift=shift)), batch(), NOTHING), Clear)

    def test_the_token_before(self) -> None:
        back = np.full((2, 12), -1)
        back[:, 1:] = np.array(IDS)[:, :-1]
        finding = only(unshifted_labels(xray(back), batch(), influence()))
        assert (finding.where.example, finding.where.position, finding.where.token_id) == (0, 1, 10)
        assert "22 of 22 positions" in finding.message
        back[:, 4:] = targets(shift=1)[:, 4:]
        assert isinstance(unshifted_labels(xray(back), batch(), influence()), Clear)
        pairs = ((5, 6) * 6, (7, 8) * 6)  # the token before is the next one, too
        shifted = np.full((2, 12), -1)
        shifted[:, 1:] = np.array(pairs)[:, :-1]
        assert isinstance(unshifted_labels(xray(shifted), batch(pairs), influence()), Unknown)

    def test_half_is_the_limit(self) -> None:
        for num_own, found in ((12, True), (10, False)):
            target = targets(shift=1)
            flat, own = target.reshape(-1), np.array(IDS).reshape(-1)
            places = [i for i in range(24) if i % 12 < 11][:num_own]
            flat[places] = own[places]
            assert isinstance(unshifted_labels(xray(target), batch(), NOTHING), Found) is found

    def test_the_same_token_again_and_again_tells_nothing(self) -> None:
        same = ((5,) * 12, (5,) * 12)
        said = unshifted_labels(xray(targets(same, 0)), batch(same), NOTHING)
        assert isinstance(said, Unknown)
        assert "0 positions" in said.reason

    def test_a_model_that_looks_both_ways_is_judged_elsewhere(self) -> None:
        assert isinstance(unshifted_labels(xray(targets(shift=0)), batch(), influence(causal=False)), NotApplicable)

    def test_ambiguous_positions_and_other_losses_do_not_count(self) -> None:
        unsure = xray(targets(shift=0), ambiguous_BT=np.ones((2, 12), dtype=bool))
        assert isinstance(unshifted_labels(unsure, batch(), NOTHING), Unknown)
        assert isinstance(unshifted_labels(xray(targets(shift=0), kind=LossKind.OTHER), batch(), NOTHING), Unknown)
        assert isinstance(unshifted_labels(xray(np.full((2, 12), -1)), batch(), NOTHING), Unknown)


class TestTwiceShiftedLabels:
    def test_found_and_its_healthy_twins(self) -> None:
        finding = only(twice_shifted_labels(xray(targets(shift=2)), batch()))
        assert finding.measured is not None
        assert finding.measured.value == 2
        for shift in (0, 1):
            assert isinstance(twice_shifted_labels(xray(targets(shift=shift)), batch()), Clear)

    def test_multi_token_prediction_is_healthy_in_either_order(self) -> None:
        one, two = targets(shift=1), targets(shift=2)
        for main, other in ((one, two), (two, one)):
            assert isinstance(twice_shifted_labels(xray(main, further=(further(other),)), batch()), Clear)

    def test_two_heads_that_both_skip_a_token_are_not(self) -> None:
        assert isinstance(twice_shifted_labels(xray(targets(shift=2), further=(further(targets(shift=2)),)), batch()), Found)

    def test_too_few_positions(self) -> None:
        target = targets(shift=2)
        target[1:] = -1
        target[0, 7:] = -1
        assert isinstance(twice_shifted_labels(xray(target), batch()), Unknown)


class TestVisibleTarget:
    def test_the_next_token_is_seen(self) -> None:
        finding = only(visible_target(xray(), batch(), influence(np.ones((12, 12)), causal=False)))
        assert finding.severity is Severity.ERROR
        assert finding.where.example == 0

    def test_a_weak_view_is_a_warning_and_rounding_is_nothing(self) -> None:
        matrix = np.triu(np.ones((12, 12)))
        for strength, severity in ((1e-4, Severity.WARNING), (1e-6, None)):
            leak = matrix + np.tril(np.full((12, 12), strength), -1)
            said = visible_target(xray(), batch(), influence(leak, causal=False))
            assert (said.findings[0].severity if isinstance(said, Found) else None) is severity

    def test_a_causal_model_is_clear_and_one_without_power_unknown(self) -> None:
        assert isinstance(visible_target(xray(), batch(), influence()), Clear)
        assert isinstance(visible_target(xray(), batch(), influence(np.zeros((12, 12)), past=0.0)), Unknown)

    def test_masked_models_keep_some_tokens(self) -> None:
        inputs = np.array(IDS)
        target = np.full((2, 12), -1)
        target[:, ::2] = inputs[:, ::2]
        seen = influence(np.ones((12, 12)), causal=False)
        for kept, found in ((1, False), (6, True)):
            ids = inputs.copy()
            ids[:, ::2] = 3
            ids[:, : 2 * kept : 2] = inputs[:, : 2 * kept : 2]
            assert isinstance(visible_target(xray(target), batch(ids.tolist()), seen), Found) is found

    def test_a_neighbour_that_happens_to_be_the_hidden_token(self) -> None:
        target = np.full((2, 12), -1)
        target[:, ::2] = 100 + np.arange(6)
        ids = np.array(IDS)
        ids[:, ::2] = 3
        ids[0, 5] = target[0, 4]  # a word that stands twice in a row, the first one hidden
        seen = influence(np.ones((12, 12)), causal=False)
        assert isinstance(visible_target(xray(target), batch(ids.tolist()), seen), Clear)

    def test_the_token_before_in_a_model_that_looks_both_ways(self) -> None:
        back = np.full((2, 12), -1)
        back[:, 1:] = np.array(IDS)[:, :-1]
        finding = only(visible_target(xray(back), batch(), influence(np.ones((12, 12)), causal=False)))
        assert "the other way" in finding.message

    def test_a_prefix_that_is_seen_and_not_trained(self) -> None:
        matrix = np.triu(np.ones((12, 12)))
        matrix[:6, :6] = 1
        target = targets()
        target[:, :5] = -1
        assert isinstance(visible_target(xray(target), batch(), influence(matrix, causal=False)), Clear)

    def test_a_causal_model_on_its_own_tokens_is_left_to_unshifted_labels(self) -> None:
        assert isinstance(visible_target(xray(targets(shift=0)), batch(), influence()), NotApplicable)


PADDED = ((10, 11, 12, 13, 14, 15, 16, 17, 18, 2, 0, 0), (30, 31, 32, 33, 34, 2, 0, 0, 0, 0, 0, 0))
LENGTHS = (10, 6)


def without_padding(lengths: tuple[int, int] = LENGTHS, ids: Any = PADDED) -> Any:
    return targets(ids, without=[(b, t) for b, n in enumerate(lengths) for t in range(n, 12)])


class TestPaddingInLoss:
    def test_found_with_its_share(self) -> None:
        finding = only(padding_in_loss(xray(targets(PADDED)), right_padded(PADDED, LENGTHS)))
        assert finding.measured is not None
        assert finding.measured.value == pytest.approx(8 / 22, abs=1e-4)
        assert (finding.where.example, finding.where.position) == (0, 9)

    def test_ignored_padding_is_clear_and_one_position_is_found(self) -> None:
        facts = right_padded(PADDED, LENGTHS)
        assert isinstance(padding_in_loss(xray(without_padding()), facts), Clear)
        assert "1 of 15" in only(padding_in_loss(xray(without_padding((11, 6))), facts)).message

    def test_the_end_token_as_padding_is_a_target_once(self) -> None:
        ids = tuple(tuple(2 if i == 0 else i for i in row) for row in PADDED)
        facts = right_padded(ids, (9, 5), pad_id=2)
        assert isinstance(padding_in_loss(xray(without_padding((10, 6), ids)), facts), Clear)
        assert isinstance(padding_in_loss(xray(without_padding((11, 6), ids)), facts), Found)

    def test_a_left_pad_may_predict_the_first_token(self) -> None:
        ids = ((0, 0, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19), (0, 0, 0, 31, 32, 33, 34, 35, 36, 37, 38, 39))
        padding = np.array(ids) == 0
        facts = batch(ids, padding_BT=padding, sides="left")
        target = targets(ids, without=[(b, t) for b in range(2) for t in range(12) if padding[b, t]])
        assert isinstance(padding_in_loss(xray(target), facts), Clear)

    def test_unknown_and_not_applicable(self) -> None:
        assert isinstance(padding_in_loss(xray(), batch(padding_BT=None, padding_source="no pad id")), Unknown)
        assert isinstance(padding_in_loss(xray(), batch()), NotApplicable)


class TestPromptInLoss:
    def test_by_roles(self) -> None:
        roles = np.array([[0] * 5 + [1] * 7] * 2)
        finding = only(prompt_in_loss(xray(), batch(roles_BT=roles)))
        assert "8 of 22" in finding.message
        answers = targets(without=[(b, t) for b in range(2) for t in range(5)])
        assert isinstance(prompt_in_loss(xray(answers), batch(roles_BT=roles)), Clear)
        template = np.array([[2] * 5 + [1] * 7] * 2)
        assert isinstance(prompt_in_loss(xray(), batch(roles_BT=template)), Clear)
        assert isinstance(prompt_in_loss(xray(), batch()), NotApplicable)


class TestUnevenTokenWeight:
    def weights(self, *rows: tuple[int, float]) -> Any:
        weight = np.zeros((len(rows), 12))
        for b, (count, each) in enumerate(rows):
            weight[b, :count] = each
        return weight

    def test_a_mean_of_means_over_examples(self) -> None:
        weight = self.weights((8, 1 / 16), (4, 1 / 8))
        finding = only(uneven_token_weight(xray(np.where(weight > 0, 5, -1), weight, kind=LossKind.WEIGHTED), NOTHING))
        assert finding.measured is not None
        assert finding.measured.value == pytest.approx(2)
        assert finding.where.example == 1

    def test_a_token_mean_is_clear_and_weights_on_purpose_too(self) -> None:
        level = self.weights((8, 1 / 12), (4, 1 / 12))
        assert isinstance(uneven_token_weight(xray(np.where(level > 0, 5, -1), level), NOTHING), Clear)
        chosen = self.weights((8, 1 / 16), (4, 1 / 8))
        chosen[0, 0] *= 3
        assert isinstance(uneven_token_weight(xray(np.where(chosen > 0, 5, -1), chosen), NOTHING), Clear)
        by_source = self.weights((8, 1 / 12), (4, 3 / 12))  # not the inverse of the counts: chosen
        assert isinstance(uneven_token_weight(xray(np.where(by_source > 0, 5, -1), by_source), NOTHING), Clear)

    def test_equal_counts_cannot_tell(self) -> None:
        weight = self.weights((8, 1 / 16), (8, 1 / 16))
        assert isinstance(uneven_token_weight(xray(np.where(weight > 0, 5, -1), weight), NOTHING), Unknown)

    def test_across_the_accumulation_window(self) -> None:
        level = self.weights((8, 1 / 12), (4, 1 / 12))
        seen = xray(np.where(level > 0, 5, -1), level)

        def window(*weights: float, steps: int = 2) -> WeightAcrossMicroBatches:
            return WeightAcrossMicroBatches(weights=weights, num_tokens=(12, 6), accumulation_steps=steps)

        finding = only(uneven_token_weight(seen, window(1 / 12, 1 / 6)))
        assert finding.where.micro_batch == 1
        assert isinstance(uneven_token_weight(seen, window(1 / 18, 1 / 18)), Clear)
        assert isinstance(uneven_token_weight(seen, window(1 / 12, 1 / 6, steps=1)), Clear)
        assert isinstance(uneven_token_weight(seen, Missing(reason="one batch")), Unknown)
        not_asked = Missing(reason="accumulation_steps is 1", outcome=Outcome.NOT_APPLICABLE)
        assert isinstance(uneven_token_weight(seen, not_asked), Clear)
        same = WeightAcrossMicroBatches(weights=(1 / 12, 1 / 12), num_tokens=(12, 12), accumulation_steps=2)
        assert isinstance(uneven_token_weight(seen, same), Unknown)


class TestNothingSupervised:
    def test_every_batch_or_some(self) -> None:
        empty = xray(np.full((2, 12), -1), loss=float("nan"))
        assert "every batch" in only(nothing_supervised(empty, batch(supervised_per_batch=(0, 0)))).message
        finding = only(nothing_supervised(xray(), batch(supervised_per_batch=(22, 0, 4))))
        assert (finding.severity, finding.where.micro_batch) == (Severity.WARNING, 1)
        assert isinstance(nothing_supervised(xray(), batch(supervised_per_batch=(1,))), Clear)
        assert isinstance(nothing_supervised(xray(), NOTHING), Clear)

    def test_labels_that_never_reach_the_loss(self) -> None:
        finding = only(nothing_supervised(xray(np.full((2, 12), -1), loss=0.0), batch(supervised_per_batch=(22,))))
        assert "none of them reaches the loss" in finding.message

    def test_groups_of_equal_reward(self) -> None:
        flat = xray(np.full((2, 12), -1), loss=0.0)
        assert isinstance(nothing_supervised(flat, batch(intent="rl")), Clear)


class TestUnsupervisedStopToken:
    def test_never_a_target(self) -> None:
        missing = targets(PADDED, without=[(b, t) for b, n in enumerate(LENGTHS) for t in range(n - 1, 12)])
        finding = only(unsupervised_stop_token(xray(missing), right_padded(PADDED, LENGTHS, pad_id=2)))
        assert (finding.where.example, finding.where.position, finding.where.token_id) == (0, 9, 2)
        assert "pad id is the end token's own" in finding.message

    def test_one_trained_end_is_enough(self) -> None:
        assert isinstance(unsupervised_stop_token(xray(without_padding()), right_padded(PADDED, LENGTHS)), Clear)
        one = without_padding((9, 6))
        assert isinstance(unsupervised_stop_token(xray(one), right_padded(PADDED, LENGTHS)), Clear)

    def test_another_stop_token_before_it(self) -> None:
        ids = tuple(tuple(9 if row[t + 1 : t + 2] == (2,) else i for t, i in enumerate(row)) for row in PADDED)
        missing = targets(ids, without=[(b, t) for b, n in enumerate(LENGTHS) for t in range(n - 1, 12)])
        assert isinstance(unsupervised_stop_token(xray(missing), right_padded(ids, LENGTHS)), Found)
        assert isinstance(
            unsupervised_stop_token(xray(missing), right_padded(ids, LENGTHS, special_ids=frozenset({9, 2}))), Clear
        )

    def test_cut_texts_and_prompts(self) -> None:
        assert isinstance(unsupervised_stop_token(xray(), batch()), NotApplicable)
        prompt = targets(PADDED, without=[(b, t) for b in range(2) for t in range(12)])
        prompt[0, 0] = 11
        assert isinstance(unsupervised_stop_token(xray(prompt), right_padded(PADDED, LENGTHS)), NotApplicable)
        assert isinstance(unsupervised_stop_token(xray(), batch(eos_ids=())), Unknown)


class TestBosCount:
    def test_twice_missing_and_right(self) -> None:
        once = ((1, *IDS[0][1:]), (1, *IDS[1][1:]))
        twice = ((1, 1, *IDS[0][2:]), (1, *IDS[1][1:]))
        assert "1 of 2 examples begin with BOS (1) twice" in only(bos_count(batch(twice, bos_id=1, adds_bos=True))).message
        assert isinstance(bos_count(batch(once, bos_id=1, adds_bos=True)), Clear)
        assert "none of 2" in only(bos_count(batch(bos_id=1, adds_bos=True))).message
        assert isinstance(bos_count(batch(bos_id=1, adds_bos=False)), Clear)
        inside = ((*IDS[0][:5], 1, *IDS[0][6:]), IDS[1])
        assert isinstance(bos_count(batch(inside, bos_id=1, adds_bos=True)), Clear)

    def test_behind_left_padding_and_not_applicable(self) -> None:
        ids = ((0, 0, 1, 1, *IDS[0][4:]),)
        facts = batch(ids, padding_BT=np.array(ids) == 0, bos_id=1)
        assert only(bos_count(facts)).where.position == 2
        assert isinstance(bos_count(batch()), NotApplicable)
        assert isinstance(bos_count(batch(bos_id=2)), NotApplicable)


class TestTruncatedAnswers:
    def test_cut_at_the_full_length(self) -> None:
        answers = targets(without=[(b, t) for b in range(2) for t in range(4)])
        finding = only(truncated_answers(xray(answers), batch()))
        assert finding.severity is Severity.WARNING
        assert "2 of 2" in finding.message

    def test_with_a_stop_token_padded_or_without_a_prompt(self) -> None:
        ended = tuple((*row[:-1], 2) for row in IDS)
        answers = targets(ended, without=[(b, t) for b in range(2) for t in range(4)])
        assert isinstance(truncated_answers(xray(answers), batch(ended)), Clear)
        assert isinstance(truncated_answers(xray(), batch()), NotApplicable)
        documents = np.array([[0] * 6 + [1] * 6] * 2)
        assert isinstance(truncated_answers(xray(), batch(document_BT=documents)), NotApplicable)

    def test_a_small_share_is_a_note(self) -> None:
        ids = tuple(tuple(range(10 * b, 10 * b + 11)) + ((2,) if b > 1 else (9,)) for b in range(1, 9))
        ids = (*ids, (*range(100, 111), 9))
        answers = targets(ids, without=[(b, t) for b in range(len(ids)) for t in range(4)])
        assert only(truncated_answers(xray(answers), batch(ids))).severity is Severity.NOTE


class TestTargetAcrossDocuments:
    documents = np.array([[0] * 6 + [1] * 6] * 2)

    def test_found_and_ignored(self) -> None:
        finding = only(target_across_documents(xray(), batch(document_BT=self.documents)))
        assert (finding.where.position, finding.where.document) == (5, 0)
        assert finding.measured is not None
        assert finding.measured.value == 2
        ignored = targets(without=[(0, 6), (1, 6)])
        assert isinstance(target_across_documents(xray(ignored), batch(document_BT=self.documents)), Clear)

    def test_nobody_announced_anything(self) -> None:
        assert isinstance(target_across_documents(xray(), batch()), NotApplicable)
