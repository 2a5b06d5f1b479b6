"""trackio: a run of our own, beside whatever run the user has."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from typing import Any

from ghoststep.evidence.steps import RunFacts, Step
from ghoststep.finding import Severity
from ghoststep.sinks.base import library, run_name, settings
from ghoststep.sinks.keys import metrics
from ghoststep.text import visible


class TrackioSink:
    """A row a step and an alert an alarm, in a run of its own in `project`.

    `trackio.init` ends the run that is current, and rows of ours would move the step counter of the user's run: ours is made in a
    copy of the context and the user's run stays current. What trackio prints goes to stderr. Rank 0 only. Needs `trackio`.
    """

    every_rank = False

    def __init__(self, project: str = "ghoststep") -> None:
        self._trackio = library("trackio", "trackio", "trackio")
        self._project = project
        self._run: Any = None

    def write(self, step: Step, facts: RunFacts) -> None:
        """One row."""
        self._opened(facts).log(metrics(step), step=step.number)

    def alarm(self, code: str, name: str, severity: Severity, message: str, step: int | None) -> None:
        """An alert, which trackio also prints and sends to a webhook if the user has set one."""
        run, levels = self._opened(RunFacts()), self._trackio.AlertLevel
        level = {Severity.ERROR: levels.ERROR, Severity.WARNING: levels.WARN}.get(severity, levels.INFO)
        with contextlib.redirect_stdout(sys.stderr):
            run.alert(title=f"{code} {name}", text=visible(message), level=level, step=step)

    def close(self) -> None:
        """Finish our run; trackio waits at most 30 seconds for its own writer."""
        run, self._run = self._run, None
        if run is not None:
            with contextlib.redirect_stdout(sys.stderr):
                run.finish()

    def _opened(self, facts: RunFacts) -> Any:
        if self._run is None:
            self._run = contextvars.copy_context().run(self._init, facts)
        return self._run

    def _init(self, facts: RunFacts) -> Any:
        trackio = self._trackio
        missing = object()
        config = vars(trackio).get("config", missing)  # `trackio.config` is the user's
        # The context is a copy, the run in it is not: the user's would be finished.
        vars_module = library("trackio.context_vars", "trackio", "trackio")
        vars_module.current_run.set(None)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return trackio.init(
                    project=self._project, name=run_name(facts), config=settings(facts), embed=False,
                    auto_log_gpu=False, auto_log_cpu=False,
                )  # fmt: skip
        finally:
            if config is not missing:
                trackio.config = config
