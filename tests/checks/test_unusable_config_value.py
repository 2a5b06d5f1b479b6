"""GS011: a value of a wrong type is said, by key and file; null and -1 are not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ghoststep.checks.vocab.unusable_config_value import unusable_config_value
from ghoststep.finding import Where
from ghoststep.instruments.declared import from_config
from ghoststep.registry import Answer, Clear, Found


def judge(values: Mapping[str, object], generation: Mapping[str, object] | None = None) -> Answer:
    return unusable_config_value(from_config(values, file="config.json", generation=generation))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", "sixty"),
        ("vocab_size", 0),
        ("hidden_size", 64.5),
        ("tie_word_embeddings", "false"),
        ("eos_token_id", "</s>"),
    ],
)
def test_found_with_key_and_file(key: str, value: object) -> None:
    said = judge({"vocab_size": 64, "hidden_size": 8, key: value})
    assert isinstance(said, Found)
    (finding,) = said.findings
    assert finding.where == Where(file="config.json", key=key)
    assert f"{key} is {value!r}" in finding.message


def test_one_finding_a_value_and_each_names_its_file() -> None:
    said = judge({"text_config": {"vocab_size": [1], "hidden_size": True}}, {"eos_token_id": {}})
    assert isinstance(said, Found)
    places = [(f.where.file, f.where.key) for f in said.findings]
    assert sorted(places) == [
        ("config.json", "text_config.hidden_size"),
        ("config.json", "text_config.vocab_size"),
        ("generation_config.json", "eos_token_id"),
    ]


def test_a_hostile_key_cannot_steer_a_terminal() -> None:
    said = judge({"\x1b[2Jtext": {"vocab_size": "x", "hidden_size": 8}})
    assert isinstance(said, Found)
    assert "\x1b" not in said.findings[0].message


def test_healthy_and_not_given_values_are_clear() -> None:
    assert isinstance(judge({"vocab_size": 64, "eos_token_id": [1, 2], "tie_word_embeddings": False}), Clear)
    assert isinstance(judge({"vocab_size": None, "pad_token_id": -1, "bos_token_id": None}, {"eos_token_id": None}), Clear)
    assert isinstance(judge({}), Clear)
