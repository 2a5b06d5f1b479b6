"""One JSON line a step, for `jq`, pandas and other programs. The run's own record is what survives a crash, not this file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO

from ghoststep.errors import UsageError
from ghoststep.evidence.steps import RunFacts, Step
from ghoststep.finding import Severity
from ghoststep.sinks.keys import metrics


class JsonlSink:
    """Appends to `path`: a line a step (`run`, `rank`, `time`, and the keys) and a line an alarm (`alarm` holds its code).

    JSON has no NaN and no infinity: they are the texts "NaN", "Infinity" and "-Infinity". Other ranks than 0 write beside it, to
    `name.rank-00001.jsonl`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: IO[bytes] | None = None
        self._facts = RunFacts()
        if self._path.is_dir():
            raise UsageError(f"the sink 'jsonl' needs a path of a file; {self._path} is a folder")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the sink 'jsonl' cannot write to {self._path}: {error.strerror or error}") from error

    def write(self, step: Step, facts: RunFacts) -> None:
        """One line."""
        self._facts = facts
        self._line({"time": step.ended_at, **{key: _json(value) for key, value in metrics(step).items()}})

    def alarm(self, code: str, name: str, severity: Severity, message: str, step: int | None) -> None:
        """One line. A lone surrogate, which UTF-8 cannot hold, is written as an escape."""
        text = message.encode("utf-8", "backslashreplace").decode()
        self._line({"alarm": code, "name": name, "severity": severity.value, "message": text, "step": step})

    def flush(self) -> None:
        """Hand the lines to the operating system."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _line(self, values: dict[str, object]) -> None:
        import msgspec

        if self._file is None:
            self._file = _of_rank(self._path, self._facts.rank).open("ab")
        self._file.write(msgspec.json.encode({"run": self._facts.run_id, "rank": self._facts.rank, **values}) + b"\n")


def _of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}.rank-{rank:05d}{path.suffix}") if rank else path


def _json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
