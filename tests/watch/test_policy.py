"""What follows an alarm, and what is refused at the start."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from ghoststep.errors import UsageError
from ghoststep.finding import Finding, Severity, Symptom, Where
from ghoststep.watching.judge import Alarm
from ghoststep.watching.policy import GhoststepWarning, LostStepError, Means, Policy, parse
from ghoststep.watching.watch import watch
from tests.watch import replay_setups

from . import watch_checks as own

CHECKS = own.ALL[:-1]


def policy(given: Any, means: Means | None = None) -> Policy:
    return Policy(rules=parse(given, CHECKS, means or Means()))


def alarm(code: str = "GS401", name: str = "zeroed-step", severity: Severity = Severity.ERROR, message: str = "lost") -> Alarm:
    return Alarm(code=code, name=name, severity=severity, finding=Finding(message=message, where=Where(step=3)), step=3)


def test_by_default_an_alarm_is_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    made = policy(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.act([alarm(), alarm("GS410", "needs-history", Severity.NOTE)])
    made.raise_pending()
    assert (made.should_stop, made.taken, made.take_rollback()) == (False, [], None)
    assert [(r.levelno, r.message) for r in caplog.records] == [(logging.ERROR, "GS401 zeroed-step at step 3: lost")]


def test_a_token_cannot_steer_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    policy(None).act([alarm(message="token '\x1b[2J\u202e'")])
    assert "\x1b" not in caplog.text
    assert "\\x1b" in caplog.text


def test_the_longest_pattern_wins_and_a_name_beats_a_prefix() -> None:
    made = policy({"GS4": "warn", "GS40": "stop", "zeroed-step": "raise", "GS404": "log"})
    chosen = {c.code: made.action_for(c.code, c.name) for c in CHECKS}
    assert chosen == {
        "GS401": "raise", "GS404": "log", "GS405": "stop", "GS408": "stop", "GS410": "warn", "GS411": "warn",
    }  # fmt: skip


def test_severity_decides_how_far_a_rule_reaches() -> None:
    word = policy("stop")
    assert word.action_for("GS408", "spiking-loss", Severity.ERROR) == "stop"
    assert word.action_for("GS408", "spiking-loss", Severity.WARNING) == "log"
    prefix = policy({"GS4": "stop"})
    assert prefix.action_for("GS408", "spiking-loss", Severity.WARNING) == "stop"
    assert prefix.action_for("GS410", "needs-history", Severity.NOTE) == "log"
    one = policy({"needs_history": "stop"})
    assert one.action_for("GS410", "needs-history", Severity.NOTE) == "stop"


def test_warn() -> None:
    with pytest.warns(GhoststepWarning, match="GS401 zeroed-step at step 3: lost"):
        policy("warn").act([alarm()])


def test_a_warning_turned_into_an_error_waits_for_a_safe_point() -> None:
    made = policy("warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error", GhoststepWarning)
        made.act([alarm()])
    with pytest.raises(GhoststepWarning):
        made.raise_pending()
    made.raise_pending()


def test_stop_tells_integrations_once_and_survives_them(caplog: pytest.LogCaptureFixture) -> None:
    made = policy("stop")
    told: list[int] = []
    made.on_stop += [lambda: told.append(1), lambda: 1 / 0]  # type: ignore[list-item]
    made.act([alarm()])
    made.act([alarm()])
    assert made.should_stop
    assert told == [1]
    assert "a stop of the integration failed" in caplog.text


def test_raise_waits_for_a_safe_point_and_comes_once() -> None:
    made = policy({"GS401": "raise"})
    made.act([alarm(), alarm()])
    with pytest.raises(LostStepError, match="zeroed-step") as caught:
        made.raise_pending()
    assert caught.value.alarm.step == 3
    made.raise_pending()


def test_a_rule_for_a_symptom_is_not_silenced_by_its_cause() -> None:
    cause = alarm()
    symptom = Symptom(code="GS405", message="follows", severity=Severity.ERROR)
    made = policy({"GS405": "stop"})
    made.act([cause])
    assert not made.should_stop
    made.act([replace(cause, finding=replace(cause.finding, symptoms=(symptom,)))])
    assert made.should_stop


def test_rollback_is_asked_for_once() -> None:
    made = policy({"zeroed-step": "rollback"})
    made.act([alarm()])
    assert made.take_rollback() is not None
    assert made.take_rollback() is None
    assert made.taken == [(3, "GS401", "rollback")]


def test_a_rollback_without_a_guard_is_refused_before_the_first_step() -> None:
    made = policy({"GS401": "rollback"})
    with pytest.raises(UsageError, match=r"for batch in w\.guard"):
        made.refuse_unguarded()
    made.guarded()
    made.refuse_unguarded()
    policy("stop").refuse_unguarded()


def test_the_codes_to_skip() -> None:
    assert policy({"GS401": "skip-step", "nonfinite-gradient": "skip_step"}).skips == {"GS401", "GS405"}
    assert policy("skip-step").skips == {"GS401", "GS402", "GS403", "GS405"}
    assert policy("skip-step").action_for("GS404", "nan-loss") == "log"
    assert policy("stop").skips == frozenset()


@pytest.mark.parametrize(
    ("given", "means", "says"),
    [
        ("explode", Means(), "'explode' is no action; expected one of log, warn"),
        ("rase", Means(), "did you mean 'raise'"),
        ({"GS401": "sotp"}, Means(), "did you mean 'stop'"),
        ({"GS4O1": "stop"}, Means(), "did you mean GS4"),
        ({"zeroed-stop": "stop"}, Means(), "did you mean zeroed-step"),
        ({"visible-future": "stop"}, Means(), "a watch asks no check 'visible-future'"),
        ({"": "stop"}, Means(), "no code, prefix"),
        ({3: "stop"}, Means(), "no code, prefix"),
        ({"GS401": None}, Means(), "no action"),
        (["stop"], Means(), "policy is a list"),
        ({"spiking-loss": "skip-step"}, Means(), "GS408 spiking-loss cannot be known before the step"),
        ({"GS4": "skip-step"}, Means(), "cannot be known before the step"),
        ({"GS401": "skip-step"}, Means(cannot_skip="it needs strict=True"), "cannot work here: it needs strict=True"),
        ("rollback", Means(cannot_roll_back="the model is sharded"), "cannot work here: the model is sharded"),
        ({"GS401": "rollback"}, Means(cannot_roll_back="it needs run_dir="), "cannot work here: it needs run_dir="),
    ],
)
def test_refused_at_the_start(given: Any, means: Means, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(given, CHECKS, means)
    assert says in str(caught.value)


def _bad_at(bad: int, policy: str, *, flushes: bool = False, **wishes: Any) -> tuple[int, bool]:
    """Steps that were taken until the loop learnt of the NaN in step `bad`, and whether it was raised."""
    model = replay_setups.Scored()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, policy=policy, flush_seconds=1e9, **wishes) as w:
        for i in range(1, 100):
            optimizer.zero_grad()
            model(*replay_setups.data(i, i == bad))["loss"].backward()
            try:
                optimizer.step()
                if flushes:
                    w.flush()
                w.step()
            except LostStepError:
                return i, True
            if w.should_stop:
                return i, False
    raise AssertionError("nobody said anything")


@pytest.mark.parametrize("policy", ["stop", "raise"])
def test_how_late_a_policy_acts(policy: str) -> None:
    """The figures of docs/watch.md: a step is judged at the first flush after it, and a step ends where the next one begins."""
    is_raised = policy == "raise"
    assert _bad_at(5, policy) == (33, is_raised)
    assert _bad_at(32, policy) == (33, is_raised)
    assert _bad_at(33, policy) == (65, is_raised), "32 steps later at most"
    assert _bad_at(33, policy, strict=True) == (65, is_raised), "strict looks before a step for skip-step only"
    assert _bad_at(5, policy, flush_steps=1) == (6, is_raised)
    assert _bad_at(5, policy, flushes=True) == (5, is_raised), "at once"
