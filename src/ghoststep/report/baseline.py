"""Comparing with an earlier report, so that only new findings count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ghoststep.config import take_out
from ghoststep.errors import ConfigError
from ghoststep.finding import Verdict
from ghoststep.report.fingerprint import fingerprint
from ghoststep.report.json_format import report_from_json


def less_baseline(verdicts: Sequence[Verdict], path: Path) -> tuple[Verdict, ...]:
    """Take out the findings that the JSON report at `path` already has (same code at the same place, whatever the figure).

    Raises `ConfigError` when the file is missing or not a report of schema version 1.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"baseline {path}: cannot be read ({error.strerror}); write one with `--format json --output {path.name}`"
        ) from error
    known = {fingerprint(v, f) for v, f in report_from_json(data, source=f"baseline {path}").findings}
    result = []
    for verdict in verdicts:
        kept = [f for f in verdict.findings if fingerprint(verdict, f) not in known]
        reasons = [f"already in the baseline {path.name}"] * (len(verdict.findings) - len(kept))
        result.append(take_out(verdict, kept, reasons))
    return tuple(result)
