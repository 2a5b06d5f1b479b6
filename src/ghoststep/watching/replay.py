"""A kept batch run again: `ghoststep check RUN --step N --setup path.py:function`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghoststep.errors import SubjectError, UsageError
from ghoststep.watching.forensics import KEY, nested

if TYPE_CHECKING:
    import torch

    from ghoststep.subjects.setup import Setup

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


def load_batches(path: Path) -> tuple[list[Any], list[str]]:
    """The micro-batches of a kept step, on the host, and what is missing from them. `SubjectError` for a file that is none of ours."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SubjectError(f"{path.name} has {path.stat().st_size} bytes; a kept batch has at most {MAX_FILE_BYTES}")
        with safe_open(str(path), framework="pt") as file:
            about = json.loads((file.metadata() or {})[KEY])
            entries: list[dict[str, Any]] = [dict(m["plain"]) for m in about["micro_batches"]]
            for name in file.keys():  # noqa: SIM118 - not a mapping
                index, _, entry = name.partition("/")
                entries[int(index)][entry] = file.get_tensor(name)
            kinds = [str(m["kind"]) for m in about["micro_batches"]]
            missing = [f"{entry} ({why})" for m in about["micro_batches"] for entry, why in m["left_out"].items()]
        return [nested(kind, e) for kind, e in zip(kinds, entries, strict=True)], missing
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise SubjectError(f"{path.name} is not a batch that ghoststep kept ({type(error).__name__}: {error})") from error


def replay(run_dir: Path, step: int, setup: Setup, *, rank: int | None = None) -> Setup:
    """The setup with the kept batch of a step in place of its own batches, on the device of its model.

    rank: whose batch where several ranks kept one; default the lowest. `UsageError` if the step was not kept (the message lists
    those that were) or the setup's loss needs entries that the kept batch lacks.
    """
    kept = kept_steps(run_dir)
    paths = [p for p in kept.get(step, []) if rank is None or p.parts[-3] == f"rank-{rank:05d}"]
    if not paths:
        of = "" if rank is None else f" of rank {rank}"
        known = ", ".join(map(str, sorted(kept))) or "none"
        raise UsageError(f"{run_dir}: the batch of step {step}{of} was not kept; kept are those of steps: {known}")
    batches, missing = load_batches(paths[0])
    _refuse_other_entries(setup, batches[0] if batches else {}, missing, step)
    device = next((p.device for p in setup.model.parameters()), None)
    placed = tuple(_as_batch(_moved(b, device)) for b in batches)
    made = replace(setup, batches=placed, name=f"{setup.name}, batch of step {step}")
    return replace(made, accumulation_steps=len(placed)) if len(placed) > 1 else made


def _refuse_other_entries(setup: Setup, batch: Any, missing: Sequence[str], step: int) -> None:
    """The watch keeps what the model was fed; a loss function may need more than that."""
    if (setup.loss_fn is None and setup.train_step is None) or not setup.batches:
        return
    has = set(batch) if isinstance(batch, Mapping) else {str(i) for i in range(len(batch))}
    lacks = [k for k in map(str, setup.batches[0]) if k not in has]
    if lacks:
        why = f" (not kept: {', '.join(missing)})" if missing else ""
        raise UsageError(
            f"the kept batch of step {step} has {', '.join(map(str, has)) or 'no entry'}; the setup's own batches also have "
            f"{', '.join(lacks)}{why}, which its loss may need. Hand the whole batch to the watch, w.step(loss, batch), or leave "
            "`loss_fn` out so that the model's own loss is used"
        )


def _moved(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, Mapping):
        return {k: _moved(v, device) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(v, device) for v in value)
    return value.to(device) if device is not None and hasattr(value, "numel") else value


def _as_batch(batch: Any) -> Any:
    from ghoststep.subjects.setup_batches import PlacedBatch

    return PlacedBatch(batch) if isinstance(batch, tuple) else batch
