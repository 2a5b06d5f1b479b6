"""GS002: a config left behind by a resize, told from padding, from rows that are only fed, and from declared sizes."""

from __future__ import annotations

import pytest

from ghoststep.checks.vocab.vocab_size_disagreement import vocab_size_disagreement
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, Tables
from ghoststep.evidence.tokenizer import Vocabulary
from ghoststep.finding import Finding, Severity
from ghoststep.instruments.declared import from_config
from ghoststep.registry import Answer, Clear, Found, NotApplicable
from tests.checks import builders as b

NOTHING = Missing(reason="not there")


def judge(tables: Tables, declared: Declared, vocabulary: Vocabulary | Missing = NOTHING) -> Answer:
    return vocab_size_disagreement(tables, declared, vocabulary)


def only(said: Answer) -> Finding:
    assert isinstance(said, Found), said
    assert len(said.findings) == 1, said.findings
    return said.findings[0]


def config(**values: object) -> Declared:
    return from_config({"hidden_size": 8, **values}, file="config.json")


def test_fewer_rows_than_declared_is_an_error() -> None:
    finding = only(judge(b.tables(64), b.declared(vocab_size=65, vocab_size_key="text_config.vocab_size")))
    assert finding.severity is Severity.ERROR
    assert "text_config.vocab_size is 65" in finding.message
    assert isinstance(judge(b.tables(64), b.declared(vocab_size=64)), Clear)


@pytest.mark.parametrize(
    ("values", "rows", "words"),
    [
        ({"vocab_size": 50277, "pad_vocab_size_multiple": 8}, 50280, "rounded up to pad_vocab_size_multiple 8"),
        ({"vocab_size": 50280, "embedding_size": 50304}, 50304, "embedding_size"),
        ({"vocab_size": 50254, "padded_vocab_size": 50432}, 50432, "padded_vocab_size"),
        ({"vocab_size": 50257, "make_vocab_size_divisible_by": 128}, 50304, "make_vocab_size_divisible_by 128"),
        (
            {"vocab_size": 50257, "make_vocab_size_divisible_by": 128, "model_parallel_size": 8},
            51200,
            "make_vocab_size_divisible_by 128 x model_parallel_size 8",
        ),
        ({"vocab_size": 151936, "additional_vocab_size": 128}, 152064, "vocab_size 151936 + additional_vocab_size 128"),
        ({"vocab_size": 60, "text_config": {"vocab_size": 9000}}, 9000, "text_config.vocab_size"),
    ],
)
def test_rows_that_the_config_accounts_for_are_clear_with_the_reason(values: dict[str, object], rows: int, words: str) -> None:
    said = judge(b.tables(rows, rows), config(**values))
    assert isinstance(said, Clear)
    assert said.reason is not None
    assert words in said.reason
    assert isinstance(judge(b.tables(rows + 9000, rows + 9000), config(**values)), Found)


def test_plausible_padding_is_a_note_and_a_large_surplus_an_error() -> None:
    padded = only(judge(b.tables(50304, 50304), b.declared(vocab_size=50257)))
    assert padded.severity is Severity.NOTE
    assert "47 more" in padded.message
    assert only(judge(b.tables(90000, 90000), b.declared(vocab_size=50257))).severity is Severity.ERROR


def test_ids_of_the_tokenizer_from_the_declared_size_on_prove_a_resize() -> None:
    declared = b.declared(vocab_size=32000)
    resized = only(judge(b.tables(32064, 32064), declared, b.vocabulary(32001)))
    assert resized.severity is Severity.ERROR
    assert "ids go up to 32000" in resized.message
    assert only(judge(b.tables(32064, 32064), declared, b.vocabulary(32000))).severity is Severity.NOTE


def test_rows_that_are_only_fed_are_a_note() -> None:
    """The head has what the config says; the input table has further rows: image, sound or prompt tokens."""
    for rows, vocabulary in ((128264, b.vocabulary(128257)), (69570, NOTHING), (128257, NOTHING)):
        finding = only(
            judge(
                b.tables(rows, 4001 if rows == 69570 else 128256),
                b.declared(vocab_size=4001 if rows == 69570 else 128256),
                vocabulary,
            )
        )
        assert finding.severity is Severity.NOTE
        assert "can be fed and not predicted" in finding.message


def test_a_head_with_other_rows_than_the_input_table() -> None:
    declared = b.declared(vocab_size=64)
    assert isinstance(judge(b.tables(64, 64), declared), Clear)
    short = only(judge(b.tables(64, 60), declared))
    assert (short.severity, short.where.tensor) == (Severity.ERROR, "lm_head.weight")
    assert only(judge(b.tables(64, 60), declared, b.vocabulary(61))).severity is Severity.ERROR
    assert only(judge(b.tables(64, 60), declared, b.vocabulary(60))).severity is Severity.NOTE
    assert only(judge(b.tables(64, 72), declared)).severity is Severity.NOTE
    assert only(judge(b.tables(64, 6400), declared)).severity is Severity.WARNING


def test_a_head_of_a_declared_size_is_clear() -> None:
    said = judge(b.tables(201024, 200058), config(vocab_size=201024, unpadded_vocab_size=200058))
    assert isinstance(said, Clear)
    assert said.reason == "201024 table rows as declared; 200058 output table rows, as declared (unpadded_vocab_size)"


def test_undeclared_size_with_one_table_cannot_disagree() -> None:
    undeclared = b.declared(vocab_size=None, vocab_size_key=None)
    assert isinstance(judge(b.tables(64), undeclared), NotApplicable)
    assert only(judge(b.tables(64, 600), undeclared)).severity is Severity.WARNING
    assert only(judge(b.tables(64, 60), undeclared, b.vocabulary(62))).severity is Severity.ERROR
