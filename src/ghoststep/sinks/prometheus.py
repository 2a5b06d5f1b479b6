"""Prometheus: the last step's numbers as gauges, and totals as counters."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Mapping
from typing import Any

from ghoststep.errors import UsageError
from ghoststep.evidence.steps import RunFacts, Step, StepOutcome
from ghoststep.finding import Severity
from ghoststep.sinks.base import library
from ghoststep.sinks.keys import KEYS, PREFIX, is_lost, metrics

_LABELS = ("run", "rank")
_TOTALS: Mapping[str, str] = {
    "steps": "optimizer steps seen",
    "lost_steps": "steps that the optimizer took with nothing left to learn from",
    "skipped_steps": "steps that the loss scaler or ghoststep skipped",
    "tokens": "ids looked up in the input tables",
}
_series: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Registry → name → metric. A name can be registered once, and two models may be watched in one process."""


class PrometheusSink:
    """`ghoststep/gradient/norm_before` becomes the gauge `ghoststep_gradient_norm_before{run, rank}`.

    A scrape sees single steps only by chance, so what must not be missed is counted: `ghoststep_steps_total`,
    `ghoststep_lost_steps_total`, `ghoststep_skipped_steps_total`, `ghoststep_tokens_total`, `ghoststep_alarms_total{code}`.

    port: serve them at this port plus the local rank, from a registry of their own; None: put them into the registry of the process
    (or `registry`), for a server that runs already. address: who may ask; the default answers this machine only.
    Needs the package `prometheus-client`.
    """

    def __init__(self, port: int | None = None, address: str = "127.0.0.1", registry: Any = None) -> None:
        self._client = library("prometheus_client", "prometheus-client", "prometheus")
        fallback = self._client.REGISTRY if port is None else self._client.CollectorRegistry()
        self._registry = registry if registry is not None else fallback
        self._labels = ("", "0")
        self._used: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._server: Any = None
        if port is not None:
            self._server = self._serve(port + int(os.environ.get("LOCAL_RANK") or 0), address)

    def write(self, step: Step, facts: RunFacts) -> None:
        """Set the gauges, raise the counters."""
        self._labels = (facts.run_id, str(facts.rank))
        for key, value in metrics(step).items():
            name = key.removeprefix(f"{PREFIX}/")
            told = KEYS.get(re.sub(r"_\d+$", "_N", name), name)
            self._one("Gauge", re.sub(r"\W", "_", key), told, self._labels).set(value)
        counted = {
            "steps": 1,
            "lost_steps": is_lost(step),
            "skipped_steps": step.outcome is not StepOutcome.STEPPED,
            "tokens": step.num_tokens,
        }
        for name, text in _TOTALS.items():
            self._one("Counter", f"{PREFIX}_{name}", text, self._labels).inc(counted[name])

    def alarm(self, code: str, name: str, severity: Severity, message: str, step: int | None) -> None:
        """Count it; a message is no label."""
        values = (*self._labels, code, name, severity.value)
        self._one("Counter", f"{PREFIX}_alarms", "new findings of the checks", values).inc()

    def close(self) -> None:
        """Stop the server and take our series out of the registry."""
        server, self._server = self._server, None
        used, self._used = self._used, {}
        for name, values in used:
            _series[self._registry][name].remove(*values)
        if server is not None:
            server[0].shutdown()
            server[0].server_close()
            server[1].join(5)

    def _one(self, kind: str, name: str, text: str, values: tuple[str, ...]) -> Any:
        one = self._used.get((name, values))
        if one is None:
            known = _series.setdefault(self._registry, {})
            if name not in known:
                labels = _LABELS if len(values) == len(_LABELS) else (*_LABELS, "code", "name", "severity")
                known[name] = getattr(self._client, kind)(name, text, labels, registry=self._registry)
            one = self._used[name, values] = known[name].labels(*values)
        return one

    def _serve(self, port: int, address: str) -> Any:
        try:
            return self._client.start_http_server(port, addr=address, registry=self._registry)
        except OSError as error:
            raise UsageError(
                f"the sink 'prometheus' cannot listen at {address}:{port} ({error.strerror or error}): choose another port"
            ) from error
