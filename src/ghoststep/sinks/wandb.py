"""Weights & Biases: the run that is active, or one of our own."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

from ghoststep.evidence.steps import RunFacts, Step
from ghoststep.finding import Severity
from ghoststep.sinks.base import library, run_name, settings
from ghoststep.sinks.keys import PREFIX, STEP, alarm_key, metrics, summary
from ghoststep.text import visible

logger = logging.getLogger("ghoststep.sinks")
_LEVELS = {Severity.ERROR: "ERROR", Severity.WARNING: "WARN", Severity.NOTE: "INFO"}
_own: weakref.WeakSet[Any] = weakref.WeakSet()
"""Runs that a sink of ours started: another watch's sink does not join them."""


class WandbSink:
    """Logs into the run that is active when the first steps arrive; without one (or with `project`), starts its own.

    In the active run, the steps of one flush become one summary (`keys.summary`) that travels with the next row the user logs:
    a row of our own would move W&B's step counter, and W&B drops what the user then logs at an earlier step. Our own run has a
    row a step; it is offline unless `mode` or WANDB_MODE says otherwise, so that nothing ever asks for a login in mid-training.
    Rank 0 only. An error is also `run.alert`. Needs the package `wandb`.
    """

    every_rank = False

    def __init__(self, project: str | None = None, mode: str | None = None) -> None:
        self._wandb = library("wandb", "wandb", "wandb")
        self._project, self._mode = project, mode
        self._run: Any = None
        self._is_own = False
        self._window: list[dict[str, float]] = []

    def write(self, step: Step, facts: RunFacts) -> None:
        """One row in our own run; kept until `flush` for somebody else's."""
        run = self._opened(facts)
        if self._is_own:
            run.log(metrics(step), step=step.number)
        else:
            self._window.append(metrics(step))

    def alarm(self, code: str, name: str, severity: Severity, message: str, step: int | None) -> None:
        """The text in the run's summary, under the alarm's key; for an error an alert too."""
        run, text = self._opened(RunFacts()), visible(message)
        run.summary[alarm_key(code)] = f"{name} ({severity.value}), step {step}: {text}"
        if severity is Severity.ERROR:
            run.alert(title=f"{code} {name}"[:63], text=text, level=_LEVELS[severity])

    def flush(self) -> None:
        """Hand the summary of the waiting steps to the active run."""
        window, self._window = self._window, []
        if window:
            self._run.log(summary(window), commit=False)

    def close(self) -> None:
        """Finish our own run; leave the user's open."""
        self.flush()
        run, self._run = self._run, None
        if run is not None and self._is_own:
            run.finish()

    def _opened(self, facts: RunFacts) -> Any:
        if self._run is not None:
            return self._run
        active = self._wandb.run
        if active is not None and self._project is None and active not in _own:
            self._run = active
        else:
            self._is_own = True
            self._run = self._wandb.init(
                project=self._project or os.environ.get("WANDB_PROJECT") or "ghoststep",
                name=run_name(facts),
                mode=self._mode or os.environ.get("WANDB_MODE") or "offline",
                config=settings(facts),
                # a second run beside an active one must not become what `wandb.log` writes to
                **({} if active is None else {"reinit": "create_new"}),
                settings=self._wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
            )
            _own.add(self._run)
            logger.info("W&B run of ghoststep: %s", self._run.dir)
        self._run.define_metric(STEP)
        self._run.define_metric(f"{PREFIX}/*", step_metric=STEP)
        return self._run
