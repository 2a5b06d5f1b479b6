"""A kept batch run again: `ghoststep check RUN --step N --setup path.py:function`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghoststep.errors import SubjectError, UsageError
from ghoststep.watching.forensics import KEY, nested

if TYPE_CHECKING:
    import torch

    from ghoststep.subjects.setup import Setup
    from ghoststep.watching.replay_form import KeptBatch

MAX_FILE_BYTES = 1 << 30
"""A kept batch larger than this is not read: nobody of ours wrote it."""


def kept_steps(run_dir: Path) -> dict[int, list[Path]]:
    """Steps whose batches are kept in a run folder, and the files (one a rank)."""
    found: dict[int, list[Path]] = {}
    for path in sorted(run_dir.glob("rank-*/batches/step-*.safetensors")):
        number = path.stem.partition("-")[2]
        if number.isdecimal():
            found.setdefault(int(number), []).append(path)
    return found


def load_batches(path: Path) -> list[KeptBatch]:
    """The micro-batches of a kept step, on the host. `SubjectError` for a file that is none of ours."""
    from safetensors import SafetensorError, safe_open

    from ghoststep.watching.replay_form import KeptBatch

    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SubjectError(f"{path.name} has {path.stat().st_size} bytes; a kept batch has at most {MAX_FILE_BYTES}")
        with safe_open(str(path), framework="pt") as file:
            told = json.loads((file.metadata() or {})[KEY])["micro_batches"]
            entries: list[dict[str, Any]] = [dict(m["plain"]) for m in told]
            for name in file.keys():  # noqa: SIM118 - not a mapping
                index, _, entry = name.partition("/")
                entries[int(index)][entry] = file.get_tensor(name)
        return [
            KeptBatch(
                value=nested(str(m["kind"]), e), missing={str(k): str(why) for k, why in m["left_out"].items()},
                micro_batch=None if m.get("micro_batch") is None else int(m["micro_batch"]), by_loop=bool(m.get("by_loop")),
            )
            for m, e in zip(told, entries, strict=True)
        ]  # fmt: skip
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise SubjectError(f"{path.name} is not a batch that ghoststep kept ({type(error).__name__}: {error})") from error


def replay(run_dir: Path, step: int, setup: Setup, *, rank: int | None = None) -> Setup:
    """The setup with the kept batch of a step in place of its own batches, on the device of its model.

    rank: whose batch where several ranks kept one; default the lowest. `UsageError` if the step was not kept (the message lists
    those that were) or the kept batch cannot be put into the form that the setup's loss takes.
    """
    kept = kept_steps(run_dir)
    paths = [p for p in kept.get(step, []) if rank is None or p.parts[-3] == f"rank-{rank:05d}"]
    if not paths:
        of = "" if rank is None else f" of rank {rank}"
        known = ", ".join(map(str, sorted(kept))) or "none"
        raise UsageError(f"{run_dir}: the batch of step {step}{of} was not kept; kept are those of steps: {known}")
    from ghoststep.watching.replay_form import fitted

    device = next((p.device for p in setup.model.parameters()), None)
    batches = [replace(k, value=_moved(k.value, device)) for k in load_batches(paths[0])]
    try:
        placed = fitted(setup, batches)
    except UsageError as error:
        raise UsageError(f"the kept batch of step {step} does not fit {setup.name}: {error}") from None
    made = replace(setup, batches=placed, name=f"{setup.name}, batch of step {step}")
    return replace(made, accumulation_steps=len(placed)) if len(placed) > 1 else made


def _moved(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, Mapping):
        return {k: _moved(v, device) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(v, device) for v in value)
    return value.to(device) if device is not None and hasattr(value, "numel") else value
