"""All sinks of one watch as one: none of them can stop the training, or each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from ghoststep.errors import GhoststepError, UsageError
from ghoststep.evidence.steps import RunFacts, Step
from ghoststep.finding import Severity
from ghoststep.sinks.base import Sink, same_random_numbers
from ghoststep.sinks.spec import open_sink
from ghoststep.text import error_text, printable, visible

logger = logging.getLogger("ghoststep.sinks")


class Sinks:
    """The sinks of one watch. `UsageError` at once for a bad spec or a missing library; after that, nothing is raised.

    A sink that raises is closed with one warning in the log `ghoststep.sinks`, and is in `broken`. Python's, numpy's and torch's
    random numbers are as they were after every call.
    """

    def __init__(self, sinks: Iterable[Sink | str] = ()) -> None:
        if isinstance(sinks, str):
            sinks = (sinks,)
        self._open: list[Sink] = []
        self._facts = RunFacts()
        self.broken: list[str] = []
        try:
            for sink in sinks:
                self._open.append(_opened(sink))
        except UsageError:
            self.close()  # a port that an earlier one holds must not stay taken
            raise

    def __bool__(self) -> bool:
        return bool(self._open)

    def write(self, steps: Sequence[Step], facts: RunFacts) -> None:
        """The steps of one flush, in order."""
        self._facts = facts

        def call(sink: Sink) -> None:
            for step in steps:
                sink.write(step, facts)

        self._each("write", call)

    def alarm(self, code: str, name: str, severity: Severity | str, message: str, step: int | None) -> None:
        """A new finding."""
        self._each("alarm", lambda sink: sink.alarm(code, name, Severity(severity), message, step))

    def flush(self) -> None:
        """After the steps and alarms of one flush of the watch."""

        def call(sink: Sink) -> None:
            flush = getattr(sink, "flush", None)
            if flush is not None:
                flush()

        self._each("flush", call)

    def close(self) -> None:
        """Close all; a second call does nothing."""
        self._each("close", lambda sink: sink.close())
        self._open = []

    def _each(self, what: str, call: Callable[[Sink], None]) -> None:
        if not self._open:
            return
        with same_random_numbers():
            for sink in tuple(self._open):
                if self._facts.rank and not getattr(sink, "every_rank", True) and what != "close":
                    continue
                try:
                    call(sink)
                except Exception as error:
                    self._drop(sink, what, error)

    def _drop(self, sink: Sink, what: str, error: Exception) -> None:
        self._open.remove(sink)
        told = f"{visible(type(sink).__name__)}.{what}: {error_text(error)}"
        self.broken.append(told)
        logger.warning("a sink of ghoststep failed and is closed; training and the other sinks go on: %s", told)
        if what != "close":
            try:
                sink.close()
            except Exception as failure:
                logger.debug("closing the sink failed too: %s", error_text(failure))


def _opened(sink: Sink | str) -> Sink:
    if isinstance(sink, str):
        try:
            with same_random_numbers():
                return open_sink(sink)
        except GhoststepError:
            raise
        except Exception as error:  # a library's own: no permission, no server
            raise UsageError(f"the sink {printable(sink)} cannot be opened: {error_text(error)}") from error
    if isinstance(sink, type):
        raise UsageError(f"a sink is an object, not a class: {visible(sink.__name__)}(...); got the class itself")
    if not isinstance(sink, Sink):
        raise UsageError(
            f"a sink needs the methods write, alarm and close (ghoststep.sinks.Sink); got {visible(type(sink).__name__)}"
        )
    return sink
