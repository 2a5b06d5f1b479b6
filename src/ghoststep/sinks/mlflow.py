"""MLflow: the run that is active, or one of our own."""

from __future__ import annotations

import os
import time
from typing import Any

from ghoststep.evidence.steps import RunFacts, Step
from ghoststep.finding import Severity
from ghoststep.sinks.base import library, run_name, settings
from ghoststep.sinks.keys import metrics
from ghoststep.text import visible

MAX_METRICS = 1000
"""MLflow's own limit for one request."""

MAX_TAG = 500
"""Characters of a tag that every tracking store keeps."""


class MlflowSink:
    """Metrics into the run that is active when the first steps arrive; without one (or with `tracking_uri`), into its own.

    Our own run is made with the client, so that a later `mlflow.start_run` is not refused. One request a flush; a store that cannot
    be reached is tried by MLflow's own rules (MLFLOW_HTTP_REQUEST_MAX_RETRIES), then this sink is closed. An alarm is the tag
    `ghoststep.alarm.GS401`. A database store keeps infinity as the largest float. Rank 0 only. Needs `mlflow` or `mlflow-skinny`.
    """

    every_rank = False

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        self._mlflow = library("mlflow", "mlflow", "mlflow")
        self._entities = library("mlflow.entities", "mlflow", "mlflow")
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._run_id = ""
        self._is_own = False
        self._waiting: list[Any] = []

    def write(self, step: Step, facts: RunFacts) -> None:
        """Kept until `flush`: one request for many steps."""
        self._open(facts)
        when = int(step.ended_at * 1000)
        self._waiting += [self._entities.Metric(key, value, when, step.number) for key, value in metrics(step).items()]

    def alarm(self, code: str, name: str, severity: Severity, message: str, step: int | None) -> None:
        """A tag of the run."""
        self._open(RunFacts())
        text = f"{name} ({severity.value}), step {step}: {visible(message)}"
        self._client.set_tag(self._run_id, f"ghoststep.alarm.{code}", text[:MAX_TAG])

    def flush(self) -> None:
        """Send what waits."""
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=waiting[start : start + MAX_METRICS])

    def close(self) -> None:
        """Send what waits and end our own run; leave the user's open."""
        client = self._client
        if client is None:
            return
        self.flush()
        self._client = None
        if self._is_own:
            client.set_terminated(self._run_id)

    def _open(self, facts: RunFacts) -> None:
        if self._client is not None:
            return
        client, active = self._mlflow.MlflowClient(tracking_uri=self._uri), self._mlflow.active_run()
        if active is not None and self._uri is None and self._experiment is None:
            self._run_id = active.info.run_id
        else:
            name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "ghoststep"
            found = client.get_experiment_by_name(name)
            experiment_id = found.experiment_id if found is not None else client.create_experiment(name)
            run = client.create_run(experiment_id, start_time=int(time.time() * 1000), run_name=run_name(facts))
            self._run_id, self._is_own = run.info.run_id, True
            params = [self._entities.Param(key, str(value)[:MAX_TAG]) for key, value in settings(facts).items()]
            client.log_batch(self._run_id, params=params)
        self._client = client
