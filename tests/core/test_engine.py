"""The engine keeps four answers apart and collects each fact once."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, replace

import pytest

from ghoststep.diagnosis import diagnose
from ghoststep.engine import Case, ask
from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.base import Evidence, Missing
from ghoststep.finding import Basis, Finding, Outcome, Power, Severity, Where
from ghoststep.registry import Answer, Check, Clear, Found, Instrument, NotApplicable, answer, check, instrument


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight(Evidence):
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Double(Evidence):
    value: float


class Scale:
    kind = "scale"
    name = "kitchen scale"
    readings = 0


@instrument
def weigh(scale: Scale) -> Weight:
    scale.readings += 1
    return Weight(value=2.0)


@instrument
def double(weight: Weight) -> Double:
    return Double(value=2 * weight.value)


@check(code="TST101", severity=Severity.ERROR, basis=Basis.PROOF)
def too_heavy(weight: Weight, *, limit: float = 1.0) -> Answer:
    """Too heavy."""
    power = Power(quantity="weight", smallest_detectable=limit)
    return answer([Finding(message=f"{weight.value} > {limit}")] if weight.value > limit else [], power=power)


@check(code="TST102", severity=Severity.WARNING, basis=Basis.PROOF)
def doubled(double: Double, weight: Weight | Missing) -> Answer:
    """Doubled."""
    return Clear(reason=f"{double.value} {getattr(weight, 'value', None)}")


def given(*instruments: Instrument, subjects: tuple[object, ...] = ()) -> Case:
    return Case(subjects or [Scale()], instruments)


def test_found_and_clear_by_option_with_power() -> None:
    case = given(weigh)
    found = ask(case, too_heavy)
    assert (found.outcome, found.severity, found.code) == (Outcome.FOUND, Severity.ERROR, "TST101")
    assert found.name == "too-heavy"
    clear = ask(case, too_heavy, {"limit": 3.0})
    assert clear.outcome is Outcome.CLEAR
    assert clear.power == Power(quantity="weight", smallest_detectable=3.0)


def test_each_fact_is_measured_once_and_on_demand() -> None:
    scale = Scale()
    case = Case([scale], [weigh, double])
    assert scale.readings == 0
    ask(case, too_heavy)
    ask(case, too_heavy)
    assert ask(case, doubled).reason == "4.0 2.0"
    assert scale.readings == 1


def test_without_its_subject_a_check_does_not_apply_and_without_an_instrument_it_is_unknown() -> None:
    verdict = ask(Case([], [weigh]), too_heavy)
    assert verdict.outcome is Outcome.NOT_APPLICABLE
    assert verdict.reason == "needs a scale, and none was given"
    blind = ask(Case([Scale()], []), too_heavy)
    assert (blind.outcome, blind.reason) == (Outcome.UNKNOWN, "nothing here measures Weight")


def test_does_not_apply_never_hides_that_another_instrument_could_not_look() -> None:
    @instrument
    def inapplicable(scale: Scale) -> Weight:
        raise DoesNotApply("a spring has no pan")

    @instrument
    def blind(scale: Scale) -> Weight:
        raise CannotLook("dark")

    for order in ((inapplicable, blind), (blind, inapplicable)):
        assert ask(given(*order), too_heavy).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (CannotLook("the pan is wet"), Outcome.UNKNOWN),
        (DoesNotApply("a spring has no pan"), Outcome.NOT_APPLICABLE),
        (ZeroDivisionError("oops"), Outcome.BROKEN),
        (RecursionError("deep"), Outcome.BROKEN),
        (BaseException("a panic in compiled code"), Outcome.BROKEN),
    ],
)
def test_an_instrument_that_fails_decides_the_outcome_of_those_that_need_it(error: BaseException, outcome: Outcome) -> None:
    @instrument
    def failing(scale: Scale) -> Weight:
        raise error

    case = given(failing, double)
    for c in (too_heavy, doubled):
        verdict = ask(case, c)
        assert verdict.outcome is outcome
        assert str(error) in (verdict.reason or "")


def test_a_second_instrument_may_still_measure() -> None:
    @instrument
    def blind(scale: Scale) -> Weight:
        raise CannotLook("dark")

    assert ask(given(blind, weigh), too_heavy).outcome is Outcome.FOUND


def test_a_check_that_raises_is_broken_and_alone() -> None:
    @check(code="TST103", severity=Severity.ERROR, basis=Basis.PROOF)
    def raising(weight: Weight) -> Answer:
        """Raises."""
        raise KeyError("row")

    case = given(weigh)
    verdict = ask(case, raising)
    assert verdict.outcome is Outcome.BROKEN
    assert "KeyError at test_engine.py" in (verdict.reason or "")
    assert ask(case, too_heavy).outcome is Outcome.FOUND


def test_wrong_answers_are_broken() -> None:
    def make(said: object) -> Check:
        def wrong(weight: Weight) -> Answer:
            """Wrong."""
            return said  # type: ignore[return-value]

        return check(code="TST104", severity=Severity.ERROR, basis=Basis.PROOF)(wrong)

    case = given(weigh)
    answers: tuple[object, ...] = (None, [], Found(findings=()), Found(findings=("text",)))  # type: ignore[arg-type]
    for said in answers:
        assert ask(case, make(said)).outcome is Outcome.BROKEN


def test_keyboard_interrupt_passes() -> None:
    @instrument
    def interrupted(scale: Scale) -> Weight:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(given(interrupted), too_heavy)


def test_a_circle_of_instruments_is_broken_not_endless() -> None:
    @instrument
    def back(double: Double) -> Weight:
        return Weight(value=double.value)

    verdict = ask(given(back, double), too_heavy)
    assert verdict.outcome is Outcome.BROKEN
    assert "circle" in (verdict.reason or "")


def test_a_rule_of_thumb_is_a_note_whatever_its_author_says() -> None:
    @check(code="TST105", severity=Severity.ERROR, basis=Basis.RULE_OF_THUMB)
    def thumb(weight: Weight) -> Answer:
        """Thumb."""
        return answer([Finding(message="x", severity=Severity.ERROR)])

    assert ask(given(weigh), thumb).severity is Severity.NOTE


def test_the_deadline_interrupts_a_slow_instrument_and_keeps_what_is_known() -> None:
    @instrument
    def slow(weight: Weight) -> Double:
        time.sleep(30)
        return Double(value=0.0)

    case = Case([Scale()], [weigh, slow], timeout_seconds=0.2)
    assert ask(case, too_heavy).outcome is Outcome.FOUND
    start = time.monotonic()
    verdict = ask(case, doubled)
    assert time.monotonic() - start < 5
    assert verdict.outcome is Outcome.UNKNOWN
    assert "out of time" in (verdict.reason or "")
    assert ask(case, too_heavy).outcome is Outcome.FOUND


def test_a_deadline_that_falls_into_the_setting_of_the_alarm_leaves_no_alarm_behind() -> None:
    """Deadlines a few microseconds away, so that the alarm rings while it is being set or put off."""
    kept, outcomes = signal.getsignal(signal.SIGALRM), set()
    for tick in range(4000):
        case = Case([Scale()], [weigh], timeout_seconds=tick % 200 * 5e-7)
        outcomes.add(ask(case, too_heavy).outcome)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), tick
        assert signal.getsignal(signal.SIGALRM) is kept, tick
    assert Outcome.UNKNOWN in outcomes


def test_the_deadline_is_looked_at_between_measurements_in_other_threads() -> None:
    seen: list[Outcome] = []

    def work() -> None:
        case = Case([Scale()], [weigh], timeout_seconds=0.0)
        seen.append(ask(case, too_heavy).outcome)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [Outcome.UNKNOWN]


def test_diagnosis_attaches_a_symptom_at_the_same_place_and_keeps_the_others() -> None:
    def nothing() -> Answer:
        """Nothing."""
        return NotApplicable(reason="-")

    cause_check = Check(nothing, code="TST201", severity=Severity.ERROR, basis=Basis.PROOF, explains=("echo",))
    cause_check.name = "shout"
    template = ask(given(weigh), too_heavy)
    cause = replace(template, code="TST201", name="shout", findings=(Finding(message="cause", where=Where(table_row=1)),))
    here = Finding(message="same place", where=Where(table_row=1, file="other"), severity=Severity.ERROR)
    there = Finding(message="elsewhere", where=Where(table_row=2), severity=Severity.WARNING)
    echo = replace(template, code="TST202", name="echo", findings=(here, there))

    got_cause, got_echo = diagnose([cause, echo], [cause_check])
    assert [s.message for s in got_cause.findings[0].symptoms] == ["same place"]
    assert [f.message for f in got_echo.findings] == ["elsewhere"]
    assert got_echo.severity is Severity.WARNING

    got_cause, got_echo = diagnose([cause, replace(echo, findings=(here,))], [cause_check])
    assert got_echo.outcome is Outcome.FOUND
    assert got_echo.severity is Severity.NOTE
    assert got_echo.findings == ()
    assert "TST201" in (got_echo.reason or "")

    untouched = diagnose([replace(cause, outcome=Outcome.CLEAR, findings=()), echo], [cause_check])
    assert untouched[1] == echo


def test_a_note_never_swallows_a_warning_and_a_place_only_explains_itself() -> None:
    template = ask(given(weigh), too_heavy)

    def nothing() -> Answer:
        """Nothing."""
        return NotApplicable(reason="-")

    shout = Check(nothing, code="TST203", severity=Severity.ERROR, basis=Basis.PROOF, explains=("echo",))
    shout.name = "shout"

    def attached(cause: Finding, symptom: Finding) -> bool:
        one = replace(template, code="TST203", name="shout", findings=(cause,))
        two = replace(template, code="TST204", name="echo", findings=(symptom,))
        return bool(diagnose([one, two], [shout])[0].findings[0].symptoms)

    note = Finding(message="cause", where=Where(table_row=1), severity=Severity.NOTE)
    warning = Finding(message="symptom", where=Where(table_row=1), severity=Severity.WARNING)
    assert not attached(note, warning)
    assert attached(warning, note)
    everywhere = Finding(message="cause", where=Where(tensor="w"), severity=Severity.ERROR)
    assert attached(everywhere, replace(warning, where=Where(tensor="w", token_id=3)))
    assert not attached(everywhere, replace(warning, where=Where(tensor="v")))
    assert not attached(replace(everywhere, where=Where(tensor="w", table_row=1)), replace(warning, where=Where(tensor="w")))


def test_a_cause_may_explain_a_symptom_wherever_it_stands() -> None:
    def nothing() -> Answer:
        """Nothing."""
        return NotApplicable(reason="-")

    template = ask(given(weigh), too_heavy)
    shout = Check(nothing, code="TST205", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("echo",))
    shout.name = "shout"
    cause = replace(template, code="TST205", name="shout", findings=(Finding(message="c", where=Where(position=1)),))
    echo = replace(template, code="TST206", name="echo", findings=(Finding(message="s", where=Where(position=9)),))
    got_cause, got_echo = diagnose([cause, echo], [shout])
    assert [s.where.position for s in got_cause.findings[0].symptoms] == [9]
    assert (got_echo.findings, got_echo.severity) == ((), Severity.NOTE)
