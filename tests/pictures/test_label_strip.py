"""The label strip: each label under its token, its weight below, padding and documents marked."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ghoststep.evidence.loss import FurtherTarget
from ghoststep.pictures import label_svg, label_text
from ghoststep.pictures.label_strip import weight_words
from ghoststep.pictures.words import columns, shown
from tests.pictures.builders import batch, xray

ANSI = re.compile("\x1b\\[[0-9;]*m")
WORDS = ["<pad>", "the", "cat", "sat", "<script>\x1b[2J", "犬も歩けば", " ", "\n", ""]
IDS = np.array([[1, 2, 3, 0]])
PADDING = np.array([[False, False, False, True]])


def test_labels_stand_under_their_tokens() -> None:
    facts = xray(np.array([[2, 3, -1, -1]]), np.array([[0.5, 0.5, 0, 0]]))
    lines = label_text(facts, batch(IDS, PADDING), token_text=WORDS.__getitem__).splitlines()
    assert lines[1:5] == [
        "        0    1    2    3",
        "token   the  cat  sat  <pad>",
        "label   cat  sat  ·    ·",
        "weight  .5   .5        PAD",
    ]
    assert "2 of 4 positions carry loss  weights add up to 1  padding: 1, with loss: 0" in lines[-2] + "  " + lines[-1]


def test_padding_that_carries_loss_is_marked_and_documents_are_divided() -> None:
    facts = xray(np.array([[2, 3, 1, 1]]), np.array([[0.25, 0.25, -0.25, 0.25]]))
    made = label_text(facts, batch(IDS, PADDING, np.array([[0, 0, 1, 1]])), token_text=WORDS.__getitem__)
    assert re.search(r"│sat +<pad>", made)
    assert "PAD!.25" in made
    assert "-.25" in made
    assert "away from the label: 1" in made
    assert "│" not in label_text(facts, batch(IDS, PADDING), token_text=WORDS.__getitem__)


def test_doubtful_labels_and_further_heads() -> None:
    facts = xray(np.array([[2, 3, -1, -1]]), np.array([[0.5, 0.5, 0, 0]]))
    unsure = replace(
        facts,
        ambiguous_BT=np.array([[True, False, True, False]]),
        further=(
            FurtherTarget(
                target_BT=np.array([[3, 0, -1, -1]]),
                weight_BT=facts.weight_BT,
                target_probability_BT=np.ones((1, 4)),
                ambiguous_BT=np.zeros((1, 4), dtype=bool),
            ),
        ),
    )
    made = label_text(unsure, batch(IDS), token_text=WORDS.__getitem__)
    assert "label    cat?  sat" in made
    assert "label 2  sat   <pad>" in made
    assert "could not be told" in made


@pytest.mark.parametrize(
    ("weight", "words"), [(0.0, ""), (1 / 12, ".083"), (-1 / 12, "-.083"), (1.0, "1"), (1e-5, "1e-05"), (123456.0, "1.2e+05")]
)
def test_weights_are_short(weight: float, words: str) -> None:
    assert weight_words(weight) == words


def test_tokens_are_escaped_and_a_tokenizer_may_fail() -> None:
    assert shown(4, WORDS.__getitem__, 30) == "<script>\\x1b[2J"
    assert shown(99, WORDS.__getitem__, 30) == "#99"
    assert shown(6, WORDS.__getitem__, 30) == "␣"
    assert shown(7, WORDS.__getitem__, 30) == "↵"
    assert shown(8, WORDS.__getitem__, 30) == "''"
    assert shown(-1, WORDS.__getitem__, 30) == "·"
    assert shown(5, lambda i: "x" * 10**6, 5) == "xxxx…"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 80) | st.just(2048), st.integers(40, 160), st.booleans(), st.integers(0, 2**31))
def test_every_width_and_length(num_positions: int, width: int, color: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    ids = random.integers(0, len(WORDS), (2, num_positions))
    weights = random.normal(size=(2, num_positions)) * (random.random((2, num_positions)) < 0.7)
    weights[random.random((2, num_positions)) < 0.05] = np.nan
    facts = xray(np.where(weights != 0, random.integers(0, len(WORDS), (2, num_positions)), -1), weights)
    given_batch = batch(ids, random.random((2, num_positions)) < 0.2, np.sort(random.integers(0, 3, (2, num_positions))))
    made = label_text(facts, given_batch, example=1, width=width, color=color, token_text=WORDS.__getitem__)
    plain = ANSI.sub("", made)
    assert ("\x1b" in made) == color
    assert max(columns(line) for line in plain.splitlines()) <= width
    positions = [int(n) for line in plain.splitlines() if re.fullmatch(r" {4}[ │\d]+", line) for n in re.findall(r"\d+", line)]
    assert positions == list(range(min(num_positions, 512)))
    assert ("the first 512 positions" in " ".join(plain.split())) == (num_positions > 512)


def test_the_svg_is_self_contained_and_escaped() -> None:
    facts = xray(np.array([[4, 3, -1, 2]]), np.array([[0.5, -0.5, 0, 0.1]]))
    picture = label_svg(facts, batch(np.array([[1, 4, 5, 0]]), PADDING, np.array([[0, 0, 1, 1]])), token_text=WORDS.__getitem__)
    root = ET.fromstring(picture)
    assert not [e for e in root.iter() if e.tag.split("}")[1] in ("script", "image", "use", "foreignObject", "a")]
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in picture
    assert "\x1b" not in picture
    boxes = [e.get("class") for e in root.iter() if e.tag.endswith("rect")]
    assert boxes.count("alarm") == 2  # one position, one legend entry
    texts = ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("text")]
    assert {"<script>\\x1b[…", ".5", "-.5", ".1"} <= set(texts)


def test_a_missing_example_is_an_error() -> None:
    with pytest.raises(IndexError):
        label_text(xray(np.array([[1]]), np.array([[1.0]])), batch(np.array([[1]])), example=3)
