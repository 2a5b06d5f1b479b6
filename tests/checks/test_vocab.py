"""GS001 to GS009 (but for GS002), each both ways: the flaw found, the healthy twin and the near miss silent."""

from __future__ import annotations

from dataclasses import replace

from ghoststep.checks.rows.dead_template_rows import dead_template_rows
from ghoststep.checks.vocab.broken_tie import broken_tie
from ghoststep.checks.vocab.nonfinite_weights import nonfinite_weights
from ghoststep.checks.vocab.shrunk_table import shrunk_table
from ghoststep.checks.vocab.special_token_disagreement import special_token_disagreement
from ghoststep.checks.vocab.token_id_out_of_range import token_id_out_of_range
from ghoststep.checks.vocab.unaligned_vocab import unaligned_vocab
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Tables
from ghoststep.evidence.plan import TrainingKind
from ghoststep.evidence.rows import InputRows
from ghoststep.evidence.tokenizer import TemplateTokens
from ghoststep.evidence.wiring import Tie
from ghoststep.finding import Finding, Outcome, Power, Severity
from ghoststep.registry import Answer, Clear, Found, NotApplicable, Unknown
from tests.checks import builders as b

NOTHING = Missing(reason="not there")


def only(said: Answer) -> Finding:
    assert isinstance(said, Found), said
    assert len(said.findings) == 1, said.findings
    return said.findings[0]


class TestTokenIdOutOfRange:
    def test_found_at_the_first_added_token_without_a_row(self) -> None:
        vocabulary = b.vocabulary(66, added={64: "<|im_start|>", 65: "<|im_end|>"})
        finding = only(token_id_out_of_range(b.tables(64), vocabulary, b.template([64]), NOTHING))
        assert finding.where.token_id == 64
        assert "'<|im_start|>' = 64" in finding.message
        assert "template emits 1 of them" in finding.message

    def test_one_id_too_many_is_seen_and_an_exact_fit_is_not(self) -> None:
        assert only(token_id_out_of_range(b.tables(64), b.vocabulary(65), NOTHING, NOTHING)).where.token_id == 64
        assert isinstance(token_id_out_of_range(b.tables(64), b.vocabulary(64), NOTHING, NOTHING), Clear)

    def test_one_special_token_at_the_end_that_nothing_emits_is_a_warning(self) -> None:
        none = Missing(reason="a base model", outcome=Outcome.NOT_APPLICABLE)
        image: dict[str, object] = {"added": {64: "<image_soft_token>"}, "added_special": frozenset({64})}
        for template in (none, b.template([3])):
            finding = only(token_id_out_of_range(b.tables(64), b.vocabulary(65, **image), template, NOTHING))
            assert finding.severity is Severity.WARNING
            assert "only text that holds it literally" in finding.message

        def severity(template: TemplateTokens | Missing, num_tokens: int = 65, **more: object) -> Severity | None:
            return only(
                token_id_out_of_range(b.tables(64), b.vocabulary(num_tokens, **{**image, **more}), template, NOTHING)
            ).severity

        assert severity(b.template([64])) is Severity.ERROR
        assert severity(NOTHING) is Severity.ERROR  # a template that could not be read may emit it
        assert severity(none, prefix_ids=(64,)) is Severity.ERROR
        assert severity(none, special_ids={"pad": 64}) is Severity.ERROR
        assert severity(none, added_special=frozenset()) is Severity.ERROR  # added as an ordinary word: text holds it
        assert severity(none, added={}, added_special=frozenset()) is Severity.ERROR
        assert severity(none, 66) is Severity.ERROR

    def test_more_table_rows_than_tokens_is_normal(self) -> None:
        assert isinstance(token_id_out_of_range(b.tables(128), b.vocabulary(64), NOTHING, NOTHING), Clear)


class TestUnalignedVocab:
    def test_a_large_head_off_64_is_a_note(self) -> None:
        said = unaligned_vocab(b.tables(67), b.stored(1000), b.tie(Tie.TIED), NOTHING)
        assert isinstance(said, Found)
        assert "Pad to 128" in said.findings[0].message

    def test_aligned_small_or_absent_heads_are_silent(self) -> None:
        assert isinstance(unaligned_vocab(b.tables(128), b.stored(2000), b.tie(Tie.TIED), NOTHING), Clear)
        assert isinstance(unaligned_vocab(b.tables(67), b.stored(100_000), b.tie(Tie.TIED), NOTHING), NotApplicable)
        assert isinstance(unaligned_vocab(b.tables(67), b.stored(1000), b.tie(Tie.NO_HEAD), NOTHING), NotApplicable)

    def test_the_head_is_what_counts(self) -> None:
        said = unaligned_vocab(b.tables(67, 128), b.stored(1000), b.tie(Tie.UNTIED), NOTHING)
        assert isinstance(said, Clear)


class TestSpecialTokenDisagreement:
    def test_ids_outside_the_table_are_one_finding_an_id(self) -> None:
        declared = b.declared(bos_token_ids=(50256,), eos_token_ids=(50256,))
        finding = only(special_token_disagreement(declared, b.tables(33), b.vocabulary(33), NOTHING))
        assert finding.where.token_id == 50256
        assert "33 rows" in finding.message
        assert "bos_token_id of the config and eos_token_id of the config" in finding.message

    def test_a_stop_token_that_generation_does_not_know(self) -> None:
        declared = b.declared(eos_token_ids=(2,), generation={"eos": (2, 3)})
        finding = only(special_token_disagreement(declared, b.tables(), b.vocabulary(special_ids={"eos": 7}), NOTHING))
        assert finding.severity is Severity.WARNING
        assert finding.where.token_id == 7

    def test_several_stop_ids_with_the_tokenizers_own_among_them(self) -> None:
        declared = b.declared(eos_token_ids=(2,), generation={"eos": (2, 7)})
        assert isinstance(
            special_token_disagreement(declared, b.tables(), b.vocabulary(special_ids={"eos": 7}), NOTHING), Clear
        )

    def test_pad_equal_to_eos_is_healthy(self) -> None:
        declared = b.declared(eos_token_ids=(2,), pad_token_ids=(2,))
        assert isinstance(
            special_token_disagreement(declared, b.tables(), b.vocabulary(special_ids={"eos": 2, "pad": 2}), NOTHING), Clear
        )

    def test_bos_that_differs_is_a_note(self) -> None:
        declared = b.declared(bos_token_ids=(1,))
        finding = only(special_token_disagreement(declared, b.tables(), b.vocabulary(special_ids={"bos": 5}), NOTHING))
        assert finding.severity is Severity.NOTE

    def test_no_tokenizer_is_unknown_not_clear(self) -> None:
        assert isinstance(special_token_disagreement(b.declared(eos_token_ids=(2,)), b.tables(), NOTHING, NOTHING), Unknown)
        assert isinstance(special_token_disagreement(b.declared(), b.tables(), NOTHING, NOTHING), NotApplicable)

    def test_a_model_that_never_generates_gets_a_note(self) -> None:
        declared = b.declared(eos_token_ids=(50256,))
        said = special_token_disagreement(declared, b.tables(33), b.vocabulary(33), b.tie(Tie.NO_HEAD))
        assert only(said).severity is Severity.NOTE
        assert only(special_token_disagreement(declared, b.tables(33), b.vocabulary(33), b.tie(Tie.TIED))).severity is None


class TestBrokenTie:
    def test_both_ways_of_breaking(self) -> None:
        different = b.tie(Tie.BROKEN_FLAG_TRUE, num_different_rows=3, first_different_row=5)
        finding = only(broken_tie(b.tables(64, 64), different))
        assert finding.where.table_row == 5
        assert "flag" in finding.message
        assert "random initialisation" in only(broken_tie(b.tables(), b.tie(Tie.BROKEN_HEAD_MISSING))).message

    def test_healthy_ties_are_silent(self) -> None:
        for kind in (Tie.TIED, Tie.UNTIED):
            assert isinstance(broken_tie(b.tables(64, 64), b.tie(kind)), Clear)
        assert isinstance(broken_tie(b.tables(), b.tie(Tie.NO_HEAD)), NotApplicable)

    def test_only_a_comparison_has_power(self) -> None:
        def power(tables: Tables, **more: object) -> Power | None:
            said = broken_tie(tables, b.tie(Tie.UNTIED, **more))
            assert isinstance(said, Clear)
            return said.power

        assert power(b.tables(64, 64)) is None
        assert power(b.tables(64, 64), num_different_rows=0) is not None
        assert power(b.tables(64, 64), first_different_row=0) is not None  # stopped at the first difference
        assert power(b.tables(64)) is not None


class TestNonfiniteWeights:
    def test_found_in_either_table(self) -> None:
        assert only(nonfinite_weights(b.inputs(nonfinite=[4]), NOTHING, NOTHING, NOTHING)).where.table_row == 4
        said = nonfinite_weights(b.inputs(), b.outputs(nonfinite=[9]), NOTHING, NOTHING)
        assert "output table row 9" in only(said).message

    def test_a_padded_row_is_milder_on_the_input_side_only(self) -> None:
        vocabulary = b.vocabulary(60)
        assert only(nonfinite_weights(b.inputs(nonfinite=[62]), NOTHING, NOTHING, vocabulary)).severity is Severity.WARNING
        assert only(nonfinite_weights(b.inputs(nonfinite=[59]), NOTHING, NOTHING, vocabulary)).severity is Severity.ERROR
        assert only(nonfinite_weights(b.inputs(), b.outputs(nonfinite=[62]), NOTHING, vocabulary)).severity is Severity.ERROR

    def test_finite_tables_are_clear_with_power(self) -> None:
        said = nonfinite_weights(b.inputs(), b.outputs(), NOTHING, NOTHING)
        assert isinstance(said, Clear)
        assert said.power is not None

    def test_a_head_that_could_not_be_read_is_not_clear_and_an_encoder_without_one_is(self) -> None:
        assert isinstance(nonfinite_weights(b.inputs(), NOTHING, NOTHING, NOTHING), Unknown)
        none = Missing(reason="an encoder", outcome=Outcome.NOT_APPLICABLE)
        assert isinstance(nonfinite_weights(b.inputs(), none, NOTHING, NOTHING), Clear)

    def test_further_tables_are_named_as_not_looked_at(self) -> None:
        tables = replace(b.tables(), others=(b.table(name="per_layer.weight"),))
        said = nonfinite_weights(b.inputs(), b.outputs(), tables, NOTHING)
        assert isinstance(said, Clear)
        assert said.reason == "not looked at: per_layer.weight"


class TestShrunkTable:
    def test_cut_to_the_number_of_tokens(self) -> None:
        vocabulary = b.vocabulary(60, max_id=66, holes=(1, 2, 3, 4, 5, 6, 7))
        assert "7 ids were cut off" in only(shrunk_table(b.tables(60), vocabulary)).message
        assert isinstance(shrunk_table(b.tables(64), vocabulary), Found)  # 60 rounded up to 64

    def test_large_enough_or_without_holes_is_clear(self) -> None:
        holes = b.vocabulary(60, max_id=66, holes=(1,))
        assert isinstance(shrunk_table(b.tables(67), holes), Clear)
        assert isinstance(shrunk_table(b.tables(50), holes), Clear)  # some other disagreement
        assert isinstance(shrunk_table(b.tables(60), b.vocabulary(60)), Clear)


def dead(inputs: InputRows, ids: list[int], kind: TrainingKind = TrainingKind.FULL, **more: object) -> Answer:
    given: dict[str, object] = {"template": b.template(ids), "vocabulary": NOTHING, "declared": NOTHING, "stored": NOTHING}
    given |= more
    return dead_template_rows(inputs, given["template"], given["vocabulary"], given["declared"], given["stored"], b.plan(kind))


class TestDeadTemplateRows:
    def test_zero_rows_are_errors_when_frozen_and_warnings_when_trained(self) -> None:
        for kind, severity in (
            (TrainingKind.LORA, Severity.ERROR),
            (TrainingKind.FROZEN_EMBEDDINGS, Severity.ERROR),
            (TrainingKind.FULL, Severity.WARNING),
            (TrainingKind.RL, Severity.WARNING),
        ):
            finding = only(dead(b.inputs({3: 0.0}), [3, 4], kind))
            assert finding.severity is severity
            assert finding.where.token_id == 3

    def test_identical_rows_cannot_be_told_apart(self) -> None:
        evidence = b.inputs(groups=[(3, 5)])
        frozen = only(dead(evidence, [3], TrainingKind.LORA))
        assert frozen.severity is Severity.ERROR
        assert "table row 5" in frozen.message
        assert only(dead(evidence, [3])).severity is Severity.NOTE
        coarse = replace(evidence, rows=replace(evidence.rows, storage="q4_0", storage_note="fp16 block scales"))
        assert "rounding" in only(dead(coarse, [3])).message

    def test_dead_rows_outside_the_template_are_silent(self) -> None:
        evidence = b.inputs({3: 0.0, 9: 1e-30}, groups=[(7, 8)])
        assert isinstance(dead(evidence, [4, 5], TrainingKind.LORA), Clear)

    def test_a_zero_row_that_padding_idx_keeps_is_told_elsewhere(self) -> None:
        declared = b.declared(pad_token_ids=(3,))
        assert isinstance(dead(b.inputs({3: 0.0}), [3], TrainingKind.LORA, declared=declared), Clear)

    def test_small_but_living_rows_are_silent(self) -> None:
        assert isinstance(dead(b.inputs({3: 1e-3}), [3], TrainingKind.LORA), Clear)

    def test_a_start_token_in_front_of_every_text_counts_without_a_template(self) -> None:
        none = Missing(reason="a base model", outcome=Outcome.NOT_APPLICABLE)
        bos = b.vocabulary(prefix_ids=(2,))
        assert only(dead(b.inputs({2: 0.0}), [], TrainingKind.LORA, template=none, vocabulary=bos)).where.token_id == 2
        assert isinstance(dead(b.inputs(), [], TrainingKind.LORA, template=none, vocabulary=bos), Clear)
        assert isinstance(dead(b.inputs({2: 0.0}), [], TrainingKind.LORA, template=none), NotApplicable)
        assert isinstance(dead(b.inputs(), [], TrainingKind.LORA, template=NOTHING, vocabulary=bos), Unknown)

    def test_an_adapter_that_stores_the_table_has_trained_it(self) -> None:
        adapter = replace(b.stored(), base_model="org/base")
        assert only(dead(b.inputs({3: 0.0}), [3], TrainingKind.LORA, stored=adapter)).severity is Severity.WARNING
