"""The influence matrix, drawn: exact cells, the edge of the forbidden region, nothing lost in blocks, strangers' tokens."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ghoststep.pictures import influence_svg, influence_text
from ghoststep.pictures.cells import cells, forbidden_pairs
from ghoststep.pictures.words import columns
from tests.pictures.builders import batch, decoder, influence

EVIL = '<script>alert("1")</script>\x1b[31m\u202e]]>&'
ANSI = re.compile("\x1b\\[[0-9;]*m")


def body(picture: str) -> list[str]:
    """The lines that hold cells, without their labels."""
    return [m[1] for line in picture.splitlines() if (m := re.match(r" *\d+ ([·░▒▓█Xx│ ]+)$", line))]


def test_a_decoder_is_drawn_cell_by_cell_with_the_edge_of_the_future() -> None:
    matrix = np.zeros((4, 4))
    matrix[0, :] = [1, 0.2, 0.05, 2e-3]
    matrix[1, 1] = matrix[2, 2] = matrix[3, 3] = 1
    assert body(influence_text(influence(matrix), None)) == ["█│· · ·", "▓▓█│· ·", "▒▒· █│·", "░░· · ██"]


def test_what_was_not_looked_at_is_blank_and_nothing_is_a_dot() -> None:
    matrix = np.eye(3)
    matrix[0, 1] = np.nan
    picture = influence_text(influence(matrix), None)
    assert body(picture) == ["█│· ·", "  █│·", "· · ██"]
    assert "blank: not looked at" in picture
    assert "blank" not in influence_text(influence(np.eye(3)), None)


@pytest.mark.parametrize(("value", "mark"), [(0.3, "X"), (2e-4, "x"), (1e-7, "·")])
def test_a_leak_is_marked_by_its_strength_and_rounding_is_not(value: float, mark: str) -> None:
    matrix = decoder(4)
    matrix[3, 1] = value
    picture = influence_text(influence(matrix), None)
    assert body(picture)[1].rstrip()[-1] == mark
    assert ("position 1 looks at position 3" in picture) == (mark != "·")
    assert ("no position is seen to look at the future" in picture) == (mark == "·")


def test_padding_and_other_documents_are_outlined_and_what_padding_sees_is_not() -> None:
    ids = np.zeros((1, 5), dtype=np.int64)
    facts = batch(ids, np.array([[0, 0, 0, 0, 1]], dtype=bool), np.array([[0, 0, 1, 1, 1]]))
    picture = influence_text(influence(np.ones((5, 5))), facts)
    assert body(picture) == ["█│XXXXXXXX", "███│XXXXXX", "XXX│█│XXXX", "XXX│███│XX", "██████████"]
    assert "the future, padding and other documents" in picture
    only = influence_text(influence(np.ones((5, 5)), causal=None), batch(ids))
    assert "X" not in only
    assert "nothing is forbidden here: made by hand" in only


def test_facts_of_another_shape_are_left_out() -> None:
    facts = batch(np.zeros((1, 3), dtype=np.int64), np.ones((1, 3), dtype=bool))
    assert forbidden_pairs(influence(np.ones((5, 5)), causal=False), facts).words == ()


@settings(max_examples=40, deadline=None)
@example(2048, 80, False, True, 0)
@example(1, 40, True, False, 0)
@given(
    st.integers(1, 60) | st.sampled_from([127, 300]),
    st.integers(40, 200),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_every_width_and_length(num_positions: int, width: int, color: bool, named: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    matrix = decoder(num_positions, seed)
    matrix[random.random(matrix.shape) < 0.2] = np.nan
    matrix[random.random(matrix.shape) < 0.01] = np.inf
    facts = batch(random.integers(0, 9, (1, num_positions)), random.random((1, num_positions)) < 0.1)
    strings = (lambda i: EVIL) if named else None
    picture = influence_text(influence(matrix), facts, width=width, color=color, token_text=strings)
    plain = ANSI.sub("", picture)
    assert ("\x1b" in picture) == color
    assert "\x1b" not in plain
    assert "\u202e" not in plain
    assert max(columns(line) for line in plain.splitlines()) <= width
    assert picture.endswith("\n")
    if color:
        uncolored = influence_text(influence(matrix), facts, width=width, token_text=strings)
        assert [line.rstrip() for line in plain.splitlines()] == uncolored.splitlines()


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 300), st.integers(1, 40), st.data())
def test_blocks_lose_no_leak_and_invent_none(num_positions: int, max_cells: int, data: st.DataObject) -> None:
    matrix = decoder(num_positions)
    target = data.draw(st.integers(0, num_positions - 2))
    source = data.draw(st.integers(target + 1, num_positions - 1))
    clean = influence(matrix.copy())
    matrix[source, target] = 0.5
    leaky = influence(matrix)
    drawn = cells(leaky, forbidden_pairs(leaky, None), max_cells)
    assert len(drawn.allowed_KL) <= max_cells
    assert drawn.forbidden_KL[target // drawn.size, source // drawn.size] == 0.5
    assert (np.nan_to_num(drawn.forbidden_KL) > 0).sum() == 1
    healthy = cells(clean, forbidden_pairs(clean, None), max_cells)
    assert np.nan_to_num(healthy.forbidden_KL).max() == 0
    assert np.nanmax(healthy.allowed_KL) == matrix[np.triu_indices(num_positions)].max()


@pytest.mark.parametrize("num_positions", [1, 2, 20, 97, 300])
def test_the_svg_is_small_self_contained_and_escaped(num_positions: int) -> None:
    matrix = decoder(num_positions)
    matrix[0, 0] = np.nan
    matrix[-1, 0] = 0.5
    facts = batch(np.zeros((1, num_positions), dtype=np.int64))
    picture = influence_svg(influence(matrix), facts, token_text=lambda i: EVIL)
    root = ET.fromstring(picture)
    assert root.tag.endswith("svg")
    assert not [e for e in root.iter() if e.tag.split("}")[1] in ("script", "image", "use", "foreignObject", "a")]
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in picture
    assert "<script" not in picture
    assert "\x1b" not in picture
    assert "prefers-color-scheme:dark" in picture
    assert len(picture) < 90_000
    classes = [e.get("class") for e in root.iter() if e.tag.endswith("path")]
    assert ("no" in classes) == (1 < num_positions <= 96)  # blocks have no gap of their own
    assert ("x2" in classes) == (num_positions > 1)
    assert ("edge" in classes) == (num_positions > 1)


def test_a_healthy_svg_shows_no_leak() -> None:
    root = ET.fromstring(influence_svg(influence(decoder(12)), None))
    classes = [e.get("class") for e in root.iter() if e.tag.endswith("path")]
    assert "x1" not in classes
    assert "x2" not in classes
    assert "no" not in classes


def test_an_empty_matrix_is_a_picture_too() -> None:
    nothing = replace(influence(np.zeros((0, 0))))
    assert "who sees whom" in influence_text(nothing, None)
    ET.fromstring(influence_svg(nothing, None))
