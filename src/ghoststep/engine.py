"""The Case: collects each fact once, on demand, and asks every check.

Four answers stay apart. A fact that cannot be had makes the checks that need it `unknown` (or `not-applicable`), with the
reason; a check or an instrument that raises makes them `broken`, and nothing else suffers.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ghoststep.errors import CannotLook, DoesNotApply, SetupCannotRun
from ghoststep.evidence.base import Evidence, Missing
from ghoststep.finding import Basis, Finding, Outcome, Severity, Verdict
from ghoststep.registry import Answer, Check, Clear, Found, Instrument, NotApplicable, Unknown
from ghoststep.undisturbed import is_undisturbed


class _OutOfTimeError(BaseException):
    """Raised by the alarm inside whatever runs; not an Exception, so that no handler in between swallows it."""


_OURS_TO_PASS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class Case:
    """One subject (or several that belong together) with what is known about it so far.

    `given` are subjects and declared facts; `instruments` can measure the rest. `timeout_seconds` bounds the whole case:
    what has not been measured by then is `unknown`, what has been stays. The alarm works in the main thread of a POSIX
    process; elsewhere the deadline is looked at between two measurements.
    """

    def __init__(
        self, given: Iterable[object], instruments: Sequence[Instrument] = (), *, timeout_seconds: float | None = None
    ) -> None:
        self._facts: dict[type, object] = {}
        for one in given:
            for kind in type(one).__mro__[:-1]:  # a subclass of a subject is that subject too
                self._facts.setdefault(kind, one)
        self._providers: dict[type, list[Instrument]] = {}
        for instrument in instruments:
            self._providers.setdefault(instrument.provides, []).append(instrument)
        self._measuring: list[type] = []
        self._timeout_seconds = timeout_seconds
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds

    def fact(self, kind: type) -> object:
        """The fact or subject of this class, measured now if need be, or `Missing`. Never raises for a defect."""
        if kind not in self._facts:
            if kind in self._measuring:
                chain = " → ".join(k.__name__ for k in (*self._measuring, kind))
                return Missing(reason=f"instruments need each other in a circle: {chain}", outcome=Outcome.BROKEN)
            self._measuring.append(kind)
            try:
                self._facts[kind] = self._measure(kind)
            finally:
                self._measuring.pop()
        return self._facts[kind]

    def cannot_run(self) -> str | None:
        """Why the subject itself cannot run, as far as anything measured so far met that; None if nothing did."""
        failed = [f for f in self._facts.values() if isinstance(f, Missing) and f.cannot_run]
        return failed[0].reason if failed else None

    def _measure(self, kind: type) -> object:
        providers = self._providers.get(kind, [])
        if not providers:
            return _nothing_provides(kind)
        failures: list[Missing] = []
        for instrument in providers:
            result = self._run(instrument)
            if not isinstance(result, Missing):
                return result
            failures.append(result)
        # The most worrying failure counts: "does not apply" from one instrument must not hide that another could not look.
        ranking = [Outcome.BROKEN, Outcome.UNKNOWN, Outcome.NOT_APPLICABLE]
        return min(failures, key=lambda m: (m.is_absent, ranking.index(m.outcome)))

    def _run(self, instrument: Instrument) -> object:
        arguments = self.arguments(instrument)
        if isinstance(arguments, Missing):
            return arguments
        try:
            result = self._in_time(instrument.function, arguments)
        except _OutOfTimeError:
            return Missing(reason=f"out of time (--timeout) during {instrument.name}")
        except DoesNotApply as error:
            return Missing(reason=str(error), outcome=Outcome.NOT_APPLICABLE)
        except CannotLook as error:
            return Missing(reason=str(error), cannot_run=isinstance(error, SetupCannotRun))
        except _OURS_TO_PASS:
            raise
        except BaseException as error:  # pyo3 panics of a library derive from BaseException, not Exception
            if _raised_by_model(error):
                return Missing(reason=f"the model raised {describe(error)}, during {instrument.name}")
            return Missing(reason=f"instrument {instrument.name} raised {describe(error)}", outcome=Outcome.BROKEN)
        if not isinstance(result, instrument.provides):
            got = type(result).__name__
            return Missing(
                reason=f"instrument {instrument.name} returned {got}, not {instrument.provides.__name__}",
                outcome=Outcome.BROKEN,
            )
        return result

    def arguments(self, injected: Check | Instrument) -> list[object] | Missing:
        """The facts that a check or instrument needs, in order, or the first `Missing` among the required ones."""
        arguments = []
        for need in injected.needs:
            value = self.fact(need.kind)
            if isinstance(value, Missing) and not need.optional:
                return value
            arguments.append(value)
        return arguments

    def _in_time(self, function: Callable[..., object], arguments: Sequence[object]) -> object:
        """The function's result; `_OutOfTimeError` from inside it once the deadline is over."""
        if self._deadline is None:
            return function(*arguments)
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise _OutOfTimeError
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
            return function(*arguments)
        return _rung(remaining, function, arguments)


def _rung(seconds: float, function: Callable[..., object], arguments: Sequence[object]) -> object:
    """Call the function with an alarm set.

    The alarm may ring at any bytecode, also in this very function before the call and after it; so it is set inside the
    `try`, and put off by the outer of two `finally`, which is reached even where the ring falls into the inner one.
    """
    is_armed = True

    def ring(*_: object) -> None:
        if is_armed and not is_undisturbed():
            raise _OutOfTimeError

    start = time.monotonic()
    outer_remaining, outer_interval = signal.getitimer(signal.ITIMER_REAL)
    previous = signal.getsignal(signal.SIGALRM)
    try:
        try:
            signal.signal(signal.SIGALRM, ring)
            # It rings again and again: one that falls into a __del__ or a callback is swallowed there.
            signal.setitimer(signal.ITIMER_REAL, seconds, 0.25)
            return function(*arguments)
        finally:
            is_armed = False
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous if previous is not None else signal.SIG_DFL)
        if outer_remaining:  # somebody else's alarm: give it back what is left of its time
            left = max(1e-3, outer_remaining - (time.monotonic() - start))
            signal.setitimer(signal.ITIMER_REAL, left, outer_interval)


_HERE = f"{Path(__file__).parent.as_posix()}/"
_LED_BY = (("/torch/nn/modules/module.py", "_call_impl"), ("/torch/autograd/graph.py", "_engine_run_backward"))


def _raised_by_model(error: BaseException) -> bool:
    """True for an ordinary exception raised behind a module's call or a backward, in code that is neither ours nor torch's.

    Read from the traceback. What torch itself raises right under a call of ours stays ours.
    """
    if not isinstance(error, Exception):
        return False
    frames = [(f.filename.replace("\\", "/"), f.name) for f in traceback.extract_tb(error.__traceback__)]
    behind = frames[max((i + 1 for i, (file, _) in enumerate(frames) if file.startswith(_HERE)), default=0) :]
    led = [i for i, (file, name) in enumerate(behind) if any(file.endswith(f) and name == n for f, n in _LED_BY)]
    return bool(led) and any("/torch/" not in file for file, _ in behind[led[0] + 1 :])


def _nothing_provides(kind: type) -> Missing:
    if issubclass(kind, Evidence):
        return Missing(reason=f"nothing here measures {kind.__name__}")
    name = getattr(kind, "kind", kind.__name__.lower())
    return Missing(reason=f"needs a {name}, and none was given", outcome=Outcome.NOT_APPLICABLE, is_absent=True)


def describe(error: BaseException) -> str:
    """An exception in one line, with the place it was raised at (module and line, never a machine's path)."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}{place}: {text[:500]}"


def ask(case: Case, check: Check, options: Mapping[str, Any] | None = None) -> Verdict:
    """One check's verdict. Never raises for a defect: our own bug must not break a user's work."""
    start = time.perf_counter()

    def verdict(outcome: Outcome, **more: Any) -> Verdict:
        more["reason"] = _bounded(more.get("reason"))
        base = Verdict(code=check.code, name=check.name, outcome=outcome, severity=check.severity, basis=check.basis)
        return replace(base, seconds=time.perf_counter() - start, **more)

    try:
        arguments = case.arguments(check)
        if isinstance(arguments, Missing):
            return verdict(arguments.outcome, reason=arguments.reason)
        said: Answer | object = check.function(*arguments, **(options or {}))
        if isinstance(said, Found):
            findings = tuple(_complete(f, check) for f in said.findings)
            if not findings:
                return verdict(Outcome.BROKEN, reason="the check answered found without a finding")
            return verdict(Outcome.FOUND, reason=said.reason).with_findings(findings)
    except _OURS_TO_PASS:
        raise
    except BaseException as error:  # as above
        return verdict(Outcome.BROKEN, reason=f"the check raised {describe(error)}")
    if isinstance(said, Clear):
        return verdict(Outcome.CLEAR, power=said.power, reason=said.reason)
    if isinstance(said, NotApplicable):
        return verdict(Outcome.NOT_APPLICABLE, reason=said.reason)
    if isinstance(said, Unknown):
        return verdict(Outcome.UNKNOWN, reason=said.reason)
    return verdict(Outcome.BROKEN, reason=f"the check returned {type(said).__name__}; expected Found, Clear, ...")


def _bounded(reason: str | None, most: int = 2000) -> str | None:
    """A hostile name in a reason must not fill every verdict of the report with megabytes."""
    return reason if reason is None or len(reason) <= most else f"{reason[:most]} … ({len(reason)} characters)"


def _complete(finding: Finding | object, check: Check) -> Finding:
    if not isinstance(finding, Finding):
        raise TypeError(f"a finding is a {type(finding).__name__}; expected ghoststep.Finding")
    severity, basis = finding.severity or check.severity, finding.basis or check.basis
    if basis is Basis.RULE_OF_THUMB:  # DESIGN: a rule of thumb is a note, whatever the check's author wished
        severity = Severity.NOTE
    return replace(finding, severity=severity, basis=basis)
