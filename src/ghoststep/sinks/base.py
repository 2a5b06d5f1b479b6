"""What a sink is, and what every sink of ours needs."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from ghoststep.errors import UsageError
from ghoststep.evidence.steps import RunFacts, Step
from ghoststep.finding import Severity
from ghoststep.text import visible


@runtime_checkable
class Sink(Protocol):
    """Takes steps and alarms, in the training thread, at each flush of the watch (at most 32 steps at once).

    May raise: it is then closed, once, and told nothing any more. Two optional attributes: `flush()` is called after the steps and
    alarms of one flush; `every_rank = False` asks for those of rank 0 only (default: of every rank, each in its own process).
    """

    def write(self, step: Step, facts: RunFacts) -> None:
        """One step of this rank, in order. `ghoststep.sinks.metrics(step)` turns it into keys and numbers."""

    def alarm(self, code: str, name: str, severity: Severity, message: str, step: int | None) -> None:
        """A check found something new. `message` may hold text from the user's data: escape it for where it is shown."""

    def close(self) -> None:
        """No more calls after this one."""


def library(module: str, package: str, sink: str) -> Any:
    """The module, imported now; `UsageError` with the command that installs it where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"the sink {sink!r} needs the package {package} ({visible(str(error))}): pip install {package}"
        ) from error


def run_name(facts: RunFacts) -> str:
    """What to call this run in a tracker of several runs."""
    parts = ["ghoststep", facts.run_id, f"rank-{facts.rank}" if facts.rank else ""]
    return "-".join(part for part in parts if part)


def settings(facts: RunFacts) -> dict[str, str | int]:
    """What a tracker keeps about the run beside its steps."""
    versions = {f"version_{name}": version for name, version in sorted(facts.versions.items())}
    return {
        "ghoststep_run": facts.run_id,
        "model": facts.model,
        "num_parameters": facts.num_parameters,
        "optimizers": ", ".join(facts.optimizers),
        "schedule": facts.schedule,
        "parallelism": facts.parallelism,
        "world_size": facts.world_size,
        **versions,
    }


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """A tracker that draws a random name or a random pause inside leaves the training's random numbers as they were."""
    python, numpy, torch = random.getstate(), sys.modules.get("numpy"), sys.modules.get("torch")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torch_state = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)
