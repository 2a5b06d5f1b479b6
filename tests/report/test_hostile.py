"""Strings from strangers (tokens, file names, reasons) in every format: data stays data."""

from __future__ import annotations

import json
import re
import unicodedata
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ghoststep.finding import Finding, Outcome, Report, SubjectInfo, Where
from ghoststep.report import FORMATS, render
from ghoststep.report.html import notebook_html
from ghoststep.text import visible
from tests.report.samples import HOSTILE, hostile_report, rich_report, verdict

SUMMARY = "1 clear · 1 found (1 error) · 1 not applicable · 1 could not look · 1 broken"


def one(text: str) -> Report:
    finding = Finding(message=text, where=Where(file=text, tensor=text, token=text), remedy=text)
    verdicts = (
        verdict("GS301", text, Outcome.FOUND, findings=(finding,), reason=text, subject=text),
        verdict("GS302", text, Outcome.UNKNOWN, reason=text),
        verdict("GS303", text, Outcome.BROKEN, reason=text),
    )
    return Report(
        subjects=(SubjectInfo(kind=text, name=text, facts={text: text}),), verdicts=verdicts, options={"training": text}
    )


def check_characters(rendered: str) -> None:
    """No control, bidirectional, private or unassigned character and no surrogate but our own line ends."""
    rendered.encode()
    bad = {c for c in rendered if c != "\n" and (unicodedata.category(c)[0] == "C" or unicodedata.category(c) in ("Zl", "Zp"))}
    assert not bad


@pytest.mark.parametrize("name", [*FORMATS, "html"])
def test_only_visible_characters_come_out(name: str) -> None:
    check_characters(notebook_html(hostile_report()) if name == "html" else render(hostile_report(), name))


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(), max_size=30) | st.text(st.sampled_from("\x1b\n\u202e\ud800`|<>&]:%[{@\\'\" a"), max_size=30))
def test_any_string_is_survived_by_all_formats(text: str) -> None:
    report = one(text)
    for name in FORMATS:
        check_characters(render(report, name))
    check_characters(notebook_html(report))
    json.loads(render(report, "json"))
    json.loads(render(report, "sarif"))
    ElementTree.fromstring(render(report, "junit"))
    assert_markdown_is_ours(render(report, "markdown"))
    assert_html_is_ours(notebook_html(report))
    assert all(
        re.match(r"::(error|notice) title=[^:,]*(,file=[^:,]*)?::", x) for x in render(report, "github").splitlines()[:-1]
    )


def test_terminal_prints_no_escape_but_its_own() -> None:
    for color in (False, True):
        text = render(hostile_report(), "terminal", color=color, width=100)
        rest = re.sub(r"\x1b\[[0-9;]*m", "", text)
        assert "\x1b" not in rest
        assert r"\x1b[31mred\x1b[0m\x1b]0;title\x07" in rest
        assert "[red]markup[/red]" in rest
    assert "\x1b" not in render(hostile_report(), "terminal")


@pytest.mark.parametrize("name", ["terminal", "concise", "github", "markdown"])
def test_nobody_forges_the_last_line(name: str) -> None:
    lines = render(hostile_report(), name).splitlines()
    assert lines[-1] == SUMMARY
    assert not any(line.startswith("0 clear") for line in lines)


def test_json_and_sarif_keep_the_meaning() -> None:
    for name in ("json", "sarif"):
        rendered = render(hostile_report(), name)
        assert msgspec.json.decode(rendered.encode()) == json.loads(rendered)
    finding = json.loads(render(hostile_report(), "json"))["verdicts"][0]["findings"]
    assert [f["where"]["token"] for f in finding][:4] == HOSTILE[:4]
    texts = [r["message"]["text"] for r in json.loads(render(hostile_report(), "sarif"))["runs"][0]["results"]]
    assert len(texts) == len(HOSTILE)
    for text in texts:
        assert not re.search(r"\[[^\]]*\]\(", text)  # no embedded link
        assert not re.search(r"(?<!\{)\{\d+\}(?!\})", text)  # no placeholder


def test_junit_reads_back_what_went_in() -> None:
    root = ElementTree.fromstring(render(hostile_report(), "junit"))
    tags = {element.tag for element in root.iter()}
    known = {"testsuites", "testsuite", "properties", "property", "testcase", "failure", "error", "skipped", "system-out"}
    assert tags <= known
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.text is not None
    for text in HOSTILE:
        assert f"error: message {visible(text)}" in failure.text


def test_github_runs_no_foreign_command() -> None:
    lines = render(hostile_report(), "github").splitlines()
    assert len(lines) == len(HOSTILE) + 3
    for line in lines[:-1]:
        matched = re.match(r"::(error|notice) title=([^:,]*)(,file=([^:,]*))?::(.*)$", line)
        assert matched
        assert not re.search(r"%(?!25|3A|2C)", line)
    assert "file=%250A%3A%3Aerror%3A%3Aforged %2525" in lines[9]


def assert_markdown_is_ours(text: str) -> None:
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    bare = re.sub(r"<!-- -->", "", html)
    tags = set(re.findall(r"<\s*/?\s*([a-zA-Z!?][\w-]*)", bare))
    assert tags <= {"h3", "ul", "li", "p", "code", "table", "thead", "tbody", "tr", "th", "td", "br", "sub", "strong"} | {
        "details",
        "summary",
    }
    for row in re.findall(r"<tr>.*?</tr>", bare, re.DOTALL):
        assert len(re.findall(r"<t[dh]\b", row)) == 4


def test_markdown_renders_no_foreign_markup() -> None:
    text = render(hostile_report(), "markdown")
    assert_markdown_is_ours(text)
    outside_code = re.sub(r"(`+).*?\1", "", text)
    assert "@everyone" not in outside_code
    assert "www.example" not in outside_code
    assert "http://" not in outside_code
    assert_markdown_is_ours(render(rich_report(), "markdown"))


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.tags.add("comment")


def assert_html_is_ours(html: str) -> Tags:
    parser = Tags()
    parser.feed(html)
    parser.close()
    assert parser.tags <= {"div", "span", "b", "br", "p", "ul", "li", "details", "summary"}
    assert parser.attributes <= {"style", "open"}
    return parser


def test_notebook_html_escapes_and_counts() -> None:
    text = assert_html_is_ours(notebook_html(hostile_report())).text
    for hostile in HOSTILE:
        assert visible(hostile) in text
    assert SUMMARY in text
    rich = rich_report()._repr_html_()
    assert rich == notebook_html(rich_report())
    assert_html_is_ours(rich)
    for needle in ("GS003 broken-tie", "no tokenizer.json", "division by zero", "decay needs two", "tie_word_embeddings"):
        assert needle in rich


def test_notebook_html_cuts_long_lists() -> None:
    findings = tuple(Finding(message=f"finding {i}.") for i in range(50))
    html = notebook_html(Report(subjects=(), verdicts=(verdict("GS301", "n", Outcome.FOUND, findings=findings),)))
    assert "finding 19." in html
    assert "finding 20." not in html
    assert "… and 30 more" in html
