"""What the user asked of `ghoststep run`, and how it travels to the processes that train."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Options of a run. run_dir: absolute, or None: no record. policy: as `ghoststep.watch` takes it. format: of the report, "" for
    the terminal's on stderr. output: file for it, or "". fail_on: severity the user named, or "". before: `run_models.last_numbers` of
    run_dir before the command started."""

    run_dir: str | None = None
    policy: str | dict[str, str] | None = None
    strict: bool = False
    sinks: tuple[str, ...] = ()
    detail: str = "default"
    tokenizer: str | None = None
    format: str = ""
    output: str = ""
    fail_on: str = ""
    before: dict[str, dict[int, int]] = field(default_factory=dict)

    def encode(self) -> str:
        """As text for the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Plan:
        """What `encode` wrote."""
        values = json.loads(text)
        before = {folder: {int(rank): n for rank, n in last.items()} for folder, last in values["before"].items()}
        return cls(**{**values, "sinks": tuple(values["sinks"]), "before": before})


def default_run_dir(environment: Mapping[str, str]) -> Path:
    """`ghoststep-runs/<time>`; where each rank is started with its own `ghoststep run`, a name that all of them arrive at."""
    return Path("ghoststep-runs") / (_shared_name(environment) or _time_name(Path("ghoststep-runs")))


def _shared_name(environment: Mapping[str, str]) -> str:
    error_file = environment.get("TORCHELASTIC_ERROR_FILE", "")
    if error_file and environment.get("RANK"):
        # torchrun: <log dir>/<run id>_<random>/attempt_0/<rank>/error.json; a restarted attempt goes on in the same record.
        return "torchrun-" + _as_name(Path(error_file).parent.parent.parent.name)
    if int(environment.get("SLURM_NTASKS", "1") or 1) > 1 and environment.get("SLURM_JOB_ID"):
        return f"slurm-{_as_name(environment['SLURM_JOB_ID'])}.{_as_name(environment.get('SLURM_STEP_ID', '0'))}"
    return ""


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)[:80] or "run"


def _time_name(parent: Path) -> str:
    name = time.strftime("%Y-%m-%d-%H%M%S")
    taken = 1
    while (parent / (name if taken == 1 else f"{name}-{taken}")).exists():
        taken += 1
    return name if taken == 1 else f"{name}-{taken}"


def rank_of(environment: Mapping[str, str] = os.environ) -> int:
    """This process's rank as its launcher told it; 0 where none did."""
    for key in ("RANK", "SLURM_PROCID"):
        if environment.get(key, "").isdigit():
            return int(environment[key])
    return 0
