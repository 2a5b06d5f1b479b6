"""TensorBoard event files, by torch's own writer: one event a step, which costs a third of one event a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ghoststep.evidence.steps import RunFacts, Step
from ghoststep.finding import Severity
from ghoststep.sinks.base import library
from ghoststep.sinks.keys import alarm_key, metrics
from ghoststep.text import visible


class TensorBoardSink:
    """Scalars and, for alarms, texts under `folder`; other ranks than 0 in `folder/rank-00001`, which TensorBoard shows as runs.

    TensorBoard keeps 32-bit floats: values beyond 3.4e38 are shown as infinite. Needs the package `tensorboard`.
    """

    def __init__(self, folder: str | Path) -> None:
        self._torch = library("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._summaries = library("tensorboard.compat.proto.summary_pb2", "tensorboard", "tensorboard")
        self._folder = Path(folder)
        self._writer: Any = None

    def write(self, step: Step, facts: RunFacts) -> None:
        """One scalar a key."""
        kind = self._summaries.Summary
        values = [kind.Value(tag=key, simple_value=value) for key, value in metrics(step).items()]
        self._opened(facts.rank).add_summary(kind(value=values), step.number, step.ended_at)

    def alarm(self, code: str, name: str, severity: Severity, message: str, step: int | None) -> None:
        """A text, as a block of code: TensorBoard reads Markdown, and a message may quote a token."""
        lines = [f"    {visible(line)}" for line in (f"{code} {name} ({severity.value})", *message.splitlines())]
        text = library("torch.utils.tensorboard.summary", "tensorboard", "tensorboard").text
        self._opened(0).add_summary(text(alarm_key(code), "\n".join(lines)), step)

    def flush(self) -> None:
        """Write the events to the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _opened(self, rank: int) -> Any:
        if self._writer is None:
            folder = self._folder / f"rank-{rank:05d}" if rank else self._folder
            self._writer = self._torch.FileWriter(str(folder))
        return self._writer
