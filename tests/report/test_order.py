"""Reading order and fingerprints."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghoststep.finding import Basis, Finding, Outcome, Quantity, Severity, Symptom, Verdict, Where
from ghoststep.report.fingerprint import fingerprint
from ghoststep.report.order import reading_order
from tests.report.samples import verdict


def found(code: str, severity: Severity = Severity.ERROR, causes: tuple[str, ...] = (), **more: object) -> Verdict:
    finding = Finding(message=code, symptoms=tuple(Symptom(code=c, message=c) for c in causes))
    return verdict(code, code.lower(), Outcome.FOUND, severity=severity, findings=(finding,), **more)


def codes(verdicts: tuple[Verdict, ...]) -> list[str]:
    return [v.code for v in verdicts]


def test_outcome_then_severity_then_basis_then_code() -> None:
    expected = [
        found("GS900"),
        found("GS100", basis=Basis.MEASURED),
        found("ACME100", basis=Basis.MEASURED),
        found("GS101", Severity.WARNING),
        found("GS001", Severity.NOTE),
        verdict("GS002", "b", Outcome.BROKEN),
        verdict("GS003", "c", Outcome.UNKNOWN, severity=Severity.NOTE),
        verdict("GS004", "d", Outcome.UNKNOWN),
        verdict("GS005", "e", Outcome.CLEAR),
        verdict("GS006", "f", Outcome.NOT_APPLICABLE),
    ]
    for shuffled in (expected[::-1], expected[5:] + expected[:5]):
        assert list(reading_order(shuffled)) == expected


def test_a_cause_comes_before_its_symptom_and_takes_its_rank() -> None:
    verdicts = (
        found("GS101", Severity.ERROR),
        found("GS201", Severity.WARNING),
        found("GS301", Severity.NOTE, causes=("GS001",)),
        found("GS001", Severity.ERROR),
    )
    for shuffled in itertools.permutations(verdicts):
        assert codes(reading_order(shuffled)) == ["GS101", "GS301", "GS001", "GS201"]


def test_a_cause_of_another_subject_is_no_cause() -> None:
    verdicts = (found("GS301", Severity.NOTE, causes=("GS001",), subject="a"), found("GS001", subject="b"))
    assert codes(reading_order(verdicts)) == ["GS001", "GS301"]


def test_verdicts_that_blame_each_other_are_kept() -> None:
    circle = (found("GS003", causes=("GS002",)), found("GS002", causes=("GS003",)), found("GS009", causes=("GS009",)))
    assert codes(reading_order(circle)) == ["GS009", "GS002", "GS003"]


def test_findings_are_sorted_by_their_own_severity() -> None:
    findings = tuple(
        Finding(message=str(i), severity=s) for i, s in enumerate([Severity.NOTE, None, Severity.NOTE, Severity.ERROR])
    )
    ordered = reading_order([verdict("GS301", "n", Outcome.FOUND, severity=Severity.WARNING, findings=findings)])
    assert [f.message for f in ordered[0].findings] == ["3", "1", "0", "2"]


CODES = [f"GS00{i}" for i in range(6)]


@given(
    st.lists(
        st.builds(
            found,
            st.sampled_from(CODES),
            st.sampled_from(Severity),
            st.lists(st.sampled_from(CODES), max_size=2).map(tuple),
        ),
        max_size=8,
        unique_by=lambda v: v.code,
    )
)
def test_nothing_is_lost_and_ordering_twice_changes_nothing(verdicts: list[Verdict]) -> None:
    once = reading_order(verdicts)
    assert sorted(codes(once)) == sorted(v.code for v in verdicts)
    assert reading_order(once) == once
    assert reading_order(verdicts[::-1]) == once


WHERE = Where(file="a/b.safetensors", tensor="t", table_row=7, token_id=7, token="x")
FINDING = Finding(message="m", where=WHERE)
VERDICT = verdict("GS301", "n", Outcome.FOUND, findings=(FINDING,))
PRINT = fingerprint(VERDICT, FINDING)


def test_a_fingerprint_is_pinned() -> None:
    """Baselines on disk depend on it: a change needs a new name beside `ghoststep/v1`."""
    assert PRINT == "eb7348a54b96c52f30d417063b260fc1"


@pytest.mark.parametrize(
    "same",
    [
        replace(FINDING, message="other words", remedy="r", severity=Severity.NOTE, basis=Basis.MEASURED),
        replace(FINDING, measured=Quantity(value=1e-9), symptoms=(Symptom(code="GS001", message="s"),)),
        replace(FINDING, where=replace(WHERE, step=5, micro_batch=2)),
        replace(FINDING, where=replace(WHERE, token="another spelling")),
        replace(FINDING, where=replace(WHERE, file="a\\b.safetensors")),
    ],
)
def test_figures_words_and_moments_do_not_count(same: Finding) -> None:
    assert fingerprint(VERDICT, same) == PRINT
    assert fingerprint(replace(VERDICT, outcome=Outcome.BROKEN, name="renamed", accepted=3), same) == PRINT


OTHER_PLACES = [Where(), replace(WHERE, table_row=8), replace(WHERE, token_id=8), replace(WHERE, example=8)]
OTHER_PLACES += [replace(WHERE, position=8), replace(WHERE, document=8), replace(WHERE, rank=8), replace(WHERE, file="o")]
OTHER_PLACES += [replace(WHERE, tensor="o"), replace(WHERE, module="o"), replace(WHERE, parameter="o")]


@pytest.mark.parametrize("other", OTHER_PLACES)
def test_every_part_of_the_place_counts(other: Where) -> None:
    assert fingerprint(VERDICT, replace(FINDING, where=other)) != PRINT


def test_code_and_subject_count_and_so_does_a_token_without_an_id() -> None:
    assert fingerprint(replace(VERDICT, code="GS302"), FINDING) != PRINT
    assert fingerprint(replace(VERDICT, subject="b"), FINDING) != PRINT
    tokens = [Finding(message="m", where=Where(token=t)) for t in ("a", "b", "a\0", "\ud800", "\udc80")]
    assert len({fingerprint(VERDICT, f) for f in tokens}) == len(tokens)


def test_keys_cannot_be_confused_with_values() -> None:
    one, other = Where(tensor="a\0module=b"), Where(tensor="a", module="b")
    assert fingerprint(VERDICT, Finding(message="m", where=one)) != fingerprint(VERDICT, Finding(message="m", where=other))


def test_the_same_in_another_process() -> None:
    code = (
        "from tests.report.test_order import FINDING, VERDICT; from ghoststep.report.fingerprint import fingerprint;"
        "print(fingerprint(VERDICT, FINDING))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"})
    assert done.stdout.strip() == PRINT
