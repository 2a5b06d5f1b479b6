"""A sink by a short text, for the command line and for `sinks=[...]`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from ghoststep.errors import UsageError
from ghoststep.sinks.base import Sink

SPECS: Mapping[str, str] = {
    "jsonl:PATH": "one JSON line a step",
    "tensorboard:FOLDER": "TensorBoard event files",
    "wandb[:PROJECT]": "the active W&B run, else one of its own (offline unless WANDB_MODE says otherwise)",
    "mlflow[:TRACKING_URI]": "the active MLflow run, else one of its own",
    "trackio[:PROJECT]": "a trackio run of its own",
    "prometheus[:[ADDRESS:]PORT]": "gauges in the process's registry, or served at this port (127.0.0.1 unless told)",
}
"""Spec → where it leads."""

_LIBRARIES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "prometheus": "prometheus_client",
}


def refuse(spec: str) -> None:
    """`UsageError` for a spec that cannot work, told without opening anything: no file is made, no port taken, no library imported."""
    kind, _, rest = spec.partition(":")
    if kind in ("jsonl", "tensorboard"):
        _needed(spec, rest, "a path" if kind == "jsonl" else "a folder")
    elif kind == "prometheus":
        _address(spec, rest)
    elif kind not in _LIBRARIES:
        raise UsageError(f"there is no sink {kind!r}; known are {', '.join(SPECS)}")
    if kind in _LIBRARIES and importlib.util.find_spec(_LIBRARIES[kind]) is None:
        package = _LIBRARIES[kind].replace("_", "-")
        raise UsageError(f"the sink {kind!r} needs the package {package}: pip install {package}")


def open_sink(spec: str) -> Sink:
    """The sink that a spec names ("jsonl:steps.jsonl"). `UsageError`: unknown, without what it needs, or its library missing."""
    kind, _, rest = spec.partition(":")
    if kind == "jsonl":
        from ghoststep.sinks.jsonl import JsonlSink

        return JsonlSink(_needed(spec, rest, "a path"))
    if kind == "tensorboard":
        from ghoststep.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink(_needed(spec, rest, "a folder"))
    if kind == "wandb":
        from ghoststep.sinks.wandb import WandbSink

        return WandbSink(project=rest or None)
    if kind == "mlflow":
        from ghoststep.sinks.mlflow import MlflowSink

        return MlflowSink(tracking_uri=rest or None)
    if kind == "trackio":
        from ghoststep.sinks.trackio import TrackioSink

        return TrackioSink(project=rest or "ghoststep")
    if kind == "prometheus":
        from ghoststep.sinks.prometheus import PrometheusSink

        address, port = _address(spec, rest)
        return PrometheusSink(port=port, address=address)
    raise UsageError(f"there is no sink {kind!r}; known are {', '.join(SPECS)}")


def _needed(spec: str, rest: str, what: str) -> str:
    if not rest:
        known = next(s for s in SPECS if s.startswith(spec.partition(":")[0]))
        raise UsageError(f"the sink {spec!r} needs {what}: {known}")
    return rest


def _address(spec: str, rest: str) -> tuple[str, int | None]:
    if not rest:
        return "127.0.0.1", None
    address, _, port = rest.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"the sink {spec!r} needs a port from 1 to 65535, as in prometheus:9464")
    return address.strip("[]") or "127.0.0.1", int(port)
