"""`printable` and `visible`: what a stranger's string may look like in a message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghoststep.text import printable, visible

ANY_TEXT = st.text(st.characters(), max_size=60) | st.text(
    st.sampled_from("\x00\x1b\n\r\u202e\u2028\ud800\udc00'\\a€😀"), max_size=60
)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("", "''"),
        ("Ġthe", "'Ġthe'"),
        ("\n", r"'\n'"),
        ("\\n", r"'\\n'"),
        ("it's", r"'it\'s'"),
        ("\x1b[31m", r"'\x1b[31m'"),
        ("\u202eevil", r"'\u202eevil'"),
        ("\ud800", r"'\ud800'"),
        ("\U000e0001", r"'\U000e0001'"),
        ("日本", "'日本'"),
    ],
)
def test_printable_quotes_and_escapes(raw: str, shown: str) -> None:
    assert printable(raw) == shown


def test_a_long_string_is_cut_outside_the_quotes() -> None:
    assert printable("x" * 78) == "'" + "x" * 78 + "'"
    assert printable("x" * 79) == "'" + "x" * 77 + "'…"
    assert printable("x" * 77 + "…") != printable("x" * 79)


def test_an_escape_is_never_cut_in_two() -> None:
    assert printable("ab\x1b\x1b", limit=10) == r"'ab\x1b'…"


def test_cost_does_not_depend_on_the_length() -> None:
    assert len(printable("\x00" * 50_000_000, limit=40)) <= 40


@given(ANY_TEXT, st.integers(3, 100))
def test_printable_is_short_printable_and_encodable(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= limit
    assert shown.isprintable()
    shown.encode()


@given(ANY_TEXT, ANY_TEXT)
def test_two_strings_that_fit_never_look_the_same(one: str, other: str) -> None:
    assert (printable(one, 10_000) == printable(other, 10_000)) == (one == other)


@given(ANY_TEXT)
def test_visible_is_printable_encodable_and_idempotent(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    shown.encode()
    assert visible(shown) == shown


def test_visible_leaves_ordinary_text_alone() -> None:
    text = "The input row of token 220 ('\\n') has an L2 norm of 3.1e-12 · 日本 é"
    assert visible(text) is text
