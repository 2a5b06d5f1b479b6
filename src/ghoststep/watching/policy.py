"""What follows an alarm: nothing but a log line, unless the user asked for more. Refused at the start where it cannot work."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ghoststep.errors import GhoststepError, UsageError
from ghoststep.finding import Severity
from ghoststep.registry import Check
from ghoststep.text import visible
from ghoststep.watching.guarded import traceback_text
from ghoststep.watching.judge import Alarm
from ghoststep.watching.strict import KNOWN_BEFORE
from ghoststep.watching.users_line import GhoststepWarning, users_line

__all__ = ["ACTIONS", "GhoststepWarning", "LostStepError", "Means", "Policy", "PolicyGiven", "Rule", "parse", "told"]

logger = logging.getLogger("ghoststep.watch")

ACTIONS = ("log", "warn", "stop", "raise", "skip-step", "rollback")
"""log: a line of the logger `ghoststep.watch`, which every alarm gets. warn: a `GhoststepWarning` too. stop: `should_stop` becomes
True. raise: `LostStepError` at the next safe point. skip-step: the optimizer's step is not called. rollback: see `rollback.Guard`."""

PolicyGiven = str | Mapping[str, str] | None


class LostStepError(GhoststepError):
    """An alarm of a watch whose policy is "raise"; `alarm` holds the finding. May come up to one flush after the step."""

    def __init__(self, message: str, alarm: Alarm) -> None:
        super().__init__(message)
        self.alarm = alarm


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What is there for a policy to work with. cannot_skip, cannot_roll_back: why not, "" where it can."""

    cannot_skip: str = ""
    cannot_roll_back: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One entry of a policy. pattern: a code, a prefix of codes or a name; "" is the single word for all errors. least: the mildest
    severity it acts on; `Policy.act` logs the rest."""

    pattern: str
    action: str
    least: Severity

    def matches(self, code: str, name: str) -> bool:
        """True if this check falls under the rule."""
        return code.startswith(self.pattern.upper()) or name == _as_name(self.pattern)

    def weight(self, code: str, name: str) -> int:
        """Longer patterns win; a name or a whole code beats every prefix."""
        return 1000 if _as_name(self.pattern) == name or self.pattern.upper() == code else len(self.pattern)


def parse(given: PolicyGiven, checks: Sequence[Check], means: Means) -> tuple[Rule, ...]:
    """Rules of a policy: one word for all errors, or `{"GS401": "skip-step", "GS4": "warn"}`.

    Rules for a prefix act on errors and warnings, rules for one code or name on notes too. The single word "skip-step" means the
    steps that can be known before they are taken; other errors are logged. `UsageError` for an unknown code, name or action, for a
    check that no watch asks, and for an action that cannot work here; it says what is missing.
    """
    if given is None:
        return ()
    if isinstance(given, str):
        action = _action(given, "policy")
        _refuse_means(action, f"policy {given!r}", means)
        return (Rule(pattern="", action=action, least=Severity.ERROR),)
    if not isinstance(given, Mapping):
        raise UsageError(
            f'policy is a {type(given).__name__}; expected one of {", ".join(ACTIONS)}, or a mapping such as {{"GS401": "stop"}}'
        )
    return tuple(_rule(pattern, action, checks, means) for pattern, action in given.items())


def _rule(pattern: object, given: object, checks: Sequence[Check], means: Means) -> Rule:
    if not isinstance(pattern, str) or not pattern.strip():
        raise UsageError(f"policy: {pattern!r} is no code, prefix of codes or name of a check")
    pattern = pattern.strip()
    what = f"policy {{{pattern!r}: {given!r}}}"
    action = _action(given, what)
    rule = Rule(pattern=pattern, action=action, least=Severity.WARNING)
    meant = [c for c in checks if rule.matches(c.code, c.name)]
    if not meant:
        raise UsageError(f"{what}: {_unknown(pattern, checks)}")
    if action == "skip-step":
        late = [c for c in meant if c.code not in KNOWN_BEFORE]
        if late:
            raise UsageError(
                f"{what}: {late[0].code} {late[0].name} cannot be known before the step is taken; "
                f"skip-step works for {', '.join(KNOWN_BEFORE)}"
            )
    _refuse_means(action, what, means)
    is_one = any(rule.weight(c.code, c.name) == 1000 for c in meant)
    return Rule(pattern=pattern, action=action, least=Severity.NOTE if is_one else Severity.WARNING)


def _refuse_means(action: str, what: str, means: Means) -> None:
    missing = {"skip-step": means.cannot_skip, "rollback": means.cannot_roll_back}.get(action, "")
    if missing:
        raise UsageError(f"{what} cannot work here: {missing}")


def _action(given: object, what: str) -> str:
    wanted = given.strip().lower().replace("_", "-") if isinstance(given, str) else ""
    if wanted in ACTIONS:
        return wanted
    near = difflib.get_close_matches(wanted, ACTIONS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(ACTIONS)}"
    raise UsageError(f"{what}: {given!r} is no action; {hint}")


def _unknown(pattern: str, checks: Sequence[Check]) -> str:
    """Near names among the checks that a watch asks; another check of ours is named as such."""
    known = [c.code for c in checks] + [c.name for c in checks]
    wanted = (pattern.upper(), _as_name(pattern))
    near = [m for spelling in wanted for m in difflib.get_close_matches(spelling, known, n=3)]
    if near:
        return f"a watch asks no check {pattern!r}; did you mean {', '.join(dict.fromkeys(near))}?"
    return f"a watch asks no check {pattern!r}; it asks {', '.join(f'{c.code} {c.name}' for c in checks) or 'none'}"


def _as_name(pattern: str) -> str:
    return pattern.lower().replace("_", "-")


@dataclass(slots=True, kw_only=True)
class Policy:
    """The rules of one watch and what came of them. `act` never raises: a raise waits for `raise_pending` at a safe point.

    names: of the checks, by code. on_stop: called once at the first stop, for integrations with a stop of their own. taken:
    (step, code, action) of everything beyond a log line, oldest first, at most 1000.
    """

    rules: tuple[Rule, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    on_stop: list[Callable[[], None]] = field(default_factory=list)
    should_stop: bool = False
    wants_rollback: Alarm | None = None
    taken: list[tuple[int | None, str, str]] = field(default_factory=list)
    _pending: Exception | None = None
    _guarded: bool = False

    def action_for(self, code: str, name: str, severity: Severity = Severity.ERROR) -> str:
        """The action of the longest matching rule; "log" if none matches or the finding is too mild for it."""
        rules = [r for r in self.rules if r.matches(code, name)]
        if not rules:
            return "log"
        rule = max(rules, key=lambda r: r.weight(code, name))
        if rule.action == "skip-step" and code not in KNOWN_BEFORE:
            return "log"
        return rule.action if severity.rank >= rule.least.rank else "log"

    def _action_for(self, alarm: Alarm) -> str:
        """Of the cause; where that is only logged, of what follows from it: a rule for a symptom must not be silenced by its cause."""
        action = self.action_for(alarm.code, alarm.name, alarm.severity)
        for symptom in alarm.finding.symptoms if action == "log" else ():
            followed = self.action_for(symptom.code, self.names.get(symptom.code, ""), symptom.severity or alarm.severity)
            if followed != "log":
                return followed
        return action

    @property
    def skips(self) -> frozenset[str]:
        """Codes whose steps are not to be taken."""
        return frozenset(code for code, name in KNOWN_BEFORE.items() if self.action_for(code, name) == "skip-step")

    @property
    def needs_guard(self) -> bool:
        """True if a rule says rollback, so that the loop has to run over `guard(loader)`."""
        return any(r.action == "rollback" for r in self.rules)

    def guarded(self) -> None:
        """The loop runs over `guard(loader)`."""
        self._guarded = True

    def refuse_unguarded(self) -> None:
        """To be called before the first optimizer step: `UsageError` if a rollback is wanted and no guard runs."""
        if self.needs_guard and not self._guarded:
            raise UsageError(
                'policy "rollback" needs the loop to run over the guard, `for batch in w.guard(loader):`, so that a batch can be '
                "left out and training can go on from an earlier checkpoint"
            )

    def act(self, alarms: Sequence[Alarm]) -> None:
        """Log every alarm, and do what the rules say."""
        for alarm in alarms:
            text = told(alarm)
            logger.log(_LEVELS[alarm.severity], "%s", text)
            action = self._action_for(alarm)
            if action == "log":
                continue
            if len(self.taken) < 1000:
                self.taken.append((alarm.step, alarm.code, action))
            if action == "warn":
                self._warn(text)
            elif action == "stop":
                self.stop()
            elif action == "raise":
                self._pending = self._pending or LostStepError(text, alarm)
            elif action == "rollback" and self.wants_rollback is None:
                self.wants_rollback = alarm

    def _warn(self, text: str) -> None:
        try:
            users_line().warn(text)
        except GhoststepWarning as error:  # the user turned warnings into errors
            self._pending = self._pending or error

    def stop(self) -> None:
        """Ask the loop to end."""
        if not self.should_stop:
            self.should_stop = True
            for call in self.on_stop:
                try:
                    call()
                except Exception as error:
                    logger.warning("a stop of the integration failed; `should_stop` is set\n%s", traceback_text(error))

    def raise_pending(self) -> None:
        """Raise what waits, once. To be called where an exception leaves training whole: in `w.step()`, after an optimizer's step."""
        pending, self._pending = self._pending, None
        if pending is not None:
            raise pending

    def take_rollback(self) -> Alarm | None:
        """The alarm that asked for a rollback since the last call, if any."""
        alarm, self.wants_rollback = self.wants_rollback, None
        return alarm


_LEVELS = {Severity.ERROR: logging.ERROR, Severity.WARNING: logging.WARNING, Severity.NOTE: logging.INFO}


def told(alarm: Alarm) -> str:
    """An alarm in one line that is safe for a terminal."""
    place = "" if alarm.step is None else f" at step {alarm.step}"
    again = "" if alarm.is_first else " (again, after a rollback)"
    return f"{alarm.code} {alarm.name}{place}{again}: {visible(alarm.finding.message)}"
