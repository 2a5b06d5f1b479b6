"""JSON: the published schema, exact round trips, strictness on the way back."""

from __future__ import annotations

import importlib.resources
import json
import math
from collections.abc import Callable
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ghoststep.errors import ConfigError
from ghoststep.finding import Basis, Finding, Outcome, Power, Quantity, Report, Severity, SubjectInfo, Symptom, Verdict, Where
from ghoststep.report import render
from ghoststep.report.json_format import report_from_json
from tests.report.samples import empty_report, hostile_report, rich_report

SCHEMA = json.loads((importlib.resources.files("ghoststep") / "schema" / "report-v1.json").read_text("utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
floats = st.floats(allow_nan=False)  # NaN is unequal to itself: it has a test of its own
scalars = st.integers() | floats | text | st.booleans()
maybe_text, small = st.none() | text, st.none() | st.integers(0, 2**70)
quantities = st.none() | st.builds(Quantity, value=scalars, unit=text)
wheres = st.builds(
    Where, file=maybe_text, tensor=maybe_text, module=maybe_text, token=maybe_text, table_row=small, step=small, token_id=small
)
findings = st.builds(
    Finding,
    message=text,
    where=wheres,
    measured=quantities,
    expected=quantities,
    severity=st.none() | st.sampled_from(Severity),
    basis=st.none() | st.sampled_from(Basis),
    remedy=maybe_text,
    symptoms=st.lists(st.builds(Symptom, code=text, message=text), max_size=2).map(tuple),
)
seconds = st.floats(0, 1e9)
verdicts = st.builds(
    Verdict,
    code=st.from_regex(r"[A-Z]{2,4}[0-9]{3}", fullmatch=True),
    name=text,
    outcome=st.sampled_from(Outcome),
    severity=st.sampled_from(Severity),
    basis=st.sampled_from(Basis),
    reason=maybe_text,
    power=st.none() | st.builds(Power, quantity=text, smallest_detectable=floats, unit=text),
    findings=st.lists(findings, max_size=3).map(tuple),
    seconds=seconds,
    subject=maybe_text,
    accepted=st.integers(0, 9),
)
json_values = st.recursive(
    st.none() | scalars,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(text, x, max_size=3).filter(lambda d: "value" not in d),
)
reports = st.builds(
    Report,
    subjects=st.lists(
        st.builds(SubjectInfo, kind=text, name=text, facts=st.dictionaries(text, scalars, max_size=3)), max_size=2
    ).map(tuple),
    verdicts=st.lists(verdicts, max_size=3).map(tuple),
    environment=st.dictionaries(text, text, max_size=2),
    options=st.dictionaries(text, json_values, max_size=3),
    seconds=seconds,
    exit_code=st.sampled_from([0, 1, 2]),
)


@settings(max_examples=80, deadline=None)
@given(reports)
def test_round_trip_is_exact_and_matches_the_schema(report: Report) -> None:
    written = render(report, "json")
    assert report_from_json(written.encode()) == report
    VALIDATOR.validate(json.loads(written))
    assert render(report_from_json(written.encode()), "json") == written


@pytest.mark.parametrize("make", [rich_report, empty_report, hostile_report])
def test_samples_match_the_schema(make: Callable[[], Report]) -> None:
    VALIDATOR.validate(json.loads(render(make(), "json")))


def test_the_schema_can_say_no() -> None:
    document = json.loads(render(rich_report(), "json"))
    spoilers: list[Callable[[Any], object]] = [
        lambda d: d.pop("summary"),
        lambda d: d["verdicts"][0].update(outcome="fine"),
        lambda d: d["verdicts"][2]["findings"][0]["measured"].update(value=None),
        lambda d: d["verdicts"][2]["findings"][0]["where"].update(table_row="7"),
        lambda d: d.update(exit_code=3),
    ]
    for spoil in spoilers:
        spoilt = json.loads(json.dumps(document))
        spoil(spoilt)
        assert not VALIDATOR.is_valid(spoilt)


def test_the_keys_that_other_tools_rely_on() -> None:
    document = json.loads(render(rich_report(), "json"))
    assert list(document)[:8] == [
        "schema",
        "ghoststep",
        "subjects",
        "environment",
        "options",
        "verdicts",
        "summary",
        "exit_code",
    ]
    verdict = document["verdicts"][2]
    assert list(verdict)[:9] == ["code", "name", "outcome", "severity", "basis", "reason", "power", "findings", "seconds"]
    assert list(verdict["findings"][0])[:4] == ["message", "where", "measured", "expected"]
    assert verdict["findings"][0]["where"] == {"file": "config.json", "tensor": "lm_head.weight"}
    assert document["summary"] == {
        "error": 2,
        "warning": 1,
        "note": 1,
        "clear": 2,
        "not_applicable": 1,
        "unknown": 2,
        "broken": 1,
    }


@pytest.mark.parametrize(("value", "text_form"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_non_finite_numbers_stay_strict_json(value: float, text_form: str) -> None:
    finding = Finding(message="m", measured=Quantity(value=value, unit="L2 norm"))
    verdict = Verdict(
        code="GS006",
        name="nonfinite-weights",
        outcome=Outcome.FOUND,
        severity=Severity.ERROR,
        basis=Basis.PROOF,
        findings=(finding,),
        power=Power(quantity="q", smallest_detectable=value),
        seconds=value,
    )
    report = Report(
        subjects=(SubjectInfo(kind="checkpoint", name="x", facts={"median": value}),),
        verdicts=(verdict,),
        options={"a": [value]},
    )
    written = render(report, "json")
    document = json.loads(written, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    VALIDATOR.validate(document)
    back = report_from_json(written.encode())
    measured, power = back.findings[0][1].measured, back.verdicts[0].power
    assert measured is not None
    assert power is not None
    numbers = [measured.value, power.smallest_detectable, back.subjects[0].facts["median"], back.options["a"]]
    assert list(map(str, numbers)) == [text_form, text_form, text_form, f"[{text_form}]"]
    assert back.verdicts[0].seconds == 0.0
    assert document["verdicts"][0]["findings"][0]["measured"] == {"value": None, "text": text_form, "unit": "L2 norm"}


def test_the_string_nan_stays_a_string() -> None:
    verdict = Verdict(
        code="GS006",
        name="n",
        outcome=Outcome.FOUND,
        severity=Severity.NOTE,
        basis=Basis.PROOF,
        findings=(Finding(message="m", measured=Quantity(value="nan")),),
    )
    back = report_from_json(render(Report(subjects=(), verdicts=(verdict,)), "json").encode())
    assert back.findings[0][1].measured == Quantity(value="nan")


def test_lone_surrogates_become_visible_and_nothing_else_changes() -> None:
    written = render(hostile_report(), "json")
    msgspec.json.decode(written.encode())  # a parser stricter than Python's own
    back = report_from_json(written.encode())
    raw, read = hostile_report().findings, back.findings
    for (_, one), (_, other) in zip(raw, read, strict=True):
        token = one.where.token
        assert token is not None
        assert other.where.token == token.replace("\ud800", "\\ud800").replace("\udc80", "\\udc80")


def test_options_of_any_type_are_written() -> None:
    options = {"select": ("GS3",), "set": {"b", "a"}, "basis": Basis.PROOF, "inner": {3: None}}
    written = json.loads(render(Report(subjects=(), verdicts=(), options=options), "json"))["options"]
    assert written == {"select": ["GS3"], "set": ["a", "b"], "basis": "proof", "inner": {"3": None}}


VALID = '"subjects":[],"environment":{},"options":{},"summary":{},"exit_code":0'
VERDICT = '"code":"GS301","name":"n","severity":"error","basis":"proof"'


@pytest.mark.parametrize(
    ("data", "needle"),
    [
        (b"", "not a ghoststep report"),
        (b"\xff\xfe", "not a ghoststep report"),
        (b"[]", "not a ghoststep report"),
        (b"[" * 200_000, "not a ghoststep report"),
        (b'{"schema":' + b"[" * 200_000, "not a ghoststep report"),
        (b'{"version":"2.1.0","runs":[]}', "`schema`"),
        (b'{"schema":"1"}', "`$.schema`"),
        (b'{"schema":2}', "report schema 2"),
        (b'{"schema":1}', "`subjects`"),
        (f'{{"schema":1,{VALID},"verdicts":[{{{VERDICT},"outcome":"fine","findings":[]}}]}}'.encode(), "$.verdicts[0].outcome"),
        (f'{{"schema":1,{VALID},"verdicts":[{{{VERDICT},"outcome":"found"}}]}}'.encode(), "`findings`"),
        (
            f'{{"schema":1,{VALID},"verdicts":[{{{VERDICT},"outcome":"found","findings":[{{"message":"m","where":{{"step":"1"}}}}]}}]}}'.encode(),
            "where.step",
        ),
        (
            f'{{"schema":1,{VALID},"verdicts":[{{{VERDICT},"outcome":"found","findings":[{{"message":"m","measured":{{"value":null}}}}]}}]}}'.encode(),
            '"text"',
        ),
        (b'{"schema":1,"subjects":[],"verdicts":[],"exit_code":7}', "exit_code"),
        (b'{"schema":1,"subjects":[{"kind":"c","name":"n","facts":{"a":[1]}}],"verdicts":[],"exit_code":0}', "the fact 'a'"),
        (b'{"schema":1,"subjects":[],"verdicts":[],"exit_code":0,"seconds":NaN}', "not a ghoststep report"),
    ],
)
def test_wrong_input_is_a_config_error_that_names_the_place(data: bytes, needle: str) -> None:
    with pytest.raises(ConfigError) as caught:
        report_from_json(data, source="base.json")
    assert needle in str(caught.value)
    assert str(caught.value).startswith("base.json: ")


@given(st.binary(max_size=200))
def test_garbage_never_escapes_as_another_error(data: bytes) -> None:
    with pytest.raises(ConfigError):
        report_from_json(data)


def test_unknown_keys_of_a_later_version_are_ignored() -> None:
    document = json.loads(render(rich_report(), "json"))
    document["later"] = {"a": 1}
    document["verdicts"][0]["later"] = True
    VALIDATOR.validate(document)
    assert report_from_json(json.dumps(document).encode()) == rich_report()
