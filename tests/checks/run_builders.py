"""Small synthetic records of runs: healthy steps, and the ways in which they go wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ghoststep.evidence.steps import Gap, RankRecord, RunFacts, RunRecord, Step, StepOutcome, StepRow

TABLE = "embed.weight"
TOKEN = 17


def row(token_id: int = 40, gradient_norm: float = 0.05, **more: Any) -> StepRow:
    values: dict[str, Any] = {
        "table": TABLE,
        "micro_batch": 0,
        "example": 0,
        "position": 3,
        "row_norm_before": 1.0,
        "row_norm_after": 1.001,
    }
    return StepRow(token_id=token_id, gradient_norm=gradient_norm, **{**values, **more})


def step(number: int, **more: Any) -> Step:
    """A healthy one, clipped to 1."""
    values: dict[str, Any] = {
        "ended_at": 1000.0 + number, "seconds": 1.0, "num_tokens": 256, "loss": 2.513, "norm": 1.25, "tables_norm": 0.5,
        "trunk_norm": 1.14, "norm_after": 1.0, "trunk_norm_after": 0.91, "num_gradients": 12, "lrs": (1e-3,), "moved": 1e-4,
        "clip_bound": 1.0, "rows": (row(),),
    }  # fmt: skip
    return Step(number=number, **{**values, **more})


def zeroed(number: int, **more: Any) -> Step:
    """Norm inf by one row, all gradients zero."""
    guilty = row(TOKEN, 1.2e27, example=1, position=8, micro_batch=2, row_norm_before=1e-30, row_norm_after=1e-30)
    values: dict[str, Any] = {
        "norm": math.inf, "tables_norm": math.inf, "norm_after": 0.0, "trunk_norm_after": 0.0, "num_zero_after": 12,
        "rows": (guilty, row()),
    }  # fmt: skip
    return step(number, **{**values, **more})


def crushed(number: int, size: float = 1e11, **more: Any) -> Step:
    """A finite spike of one row, clipped to 1."""
    guilty = row(TOKEN, size, example=1, position=8, row_norm_before=1e-12, row_norm_after=3e-3)
    values: dict[str, Any] = {
        "norm": size, "tables_norm": size, "norm_after": 1.0, "trunk_norm_after": 1.14 / size, "rows": (guilty, row()),
    }  # fmt: skip
    return step(number, **{**values, **more})


def nan_clipped(number: int, **more: Any) -> Step:
    """inf / inf."""
    values: dict[str, Any] = {
        "num_zero_after": 0, "num_nonfinite_after": 12, "norm_after": math.nan, "trunk_norm_after": math.nan,
        "clip_bound": math.inf, "moved": math.nan, "nonfinite_after": ("a", "b"),
    }  # fmt: skip
    return zeroed(number, **{**values, **more})


def dead(number: int) -> Step:
    """A step of a model whose weights are NaN."""
    bad = {"num_nonfinite_before": 12, "num_nonfinite_after": 12, "nonfinite_before": ("a",), "norm": math.nan}
    return step(
        number, loss=math.nan, norm_after=math.nan, trunk_norm=math.nan, trunk_norm_after=math.nan, moved=math.nan, **bad
    )


def skipped(number: int, scale: float, **more: Any) -> Step:
    values: dict[str, Any] = {
        "num_nonfinite_before": 12, "num_nonfinite_after": 12, "norm": math.inf, "norm_after": None, "trunk_norm_after": None,
        "moved": 0.0, "outcome": StepOutcome.SKIPPED_BY_SCALER,
    }  # fmt: skip
    return step(number, scale=scale, **{**values, **more})


def healthy(count: int, seed: int = 0, *, start: int = 1, scale: float = 1.0, noise: float = 0.1) -> list[Step]:
    """Noisy losses and norms of any scale; the loss falls slowly."""
    chance = random.Random(seed)
    steps = []
    for number in range(start, start + count):
        norm = scale * 1.25 * math.exp(noise * chance.gauss(0, 1))
        left = min(1.0, norm)
        loss = scale * (2.0 + math.exp(-number / 100)) * math.exp(noise * chance.gauss(0, 1))
        steps.append(
            step(
                number,
                loss=loss,
                norm=norm,
                tables_norm=0.4 * norm,
                trunk_norm=0.9165 * norm,
                norm_after=left,
                trunk_norm_after=0.9165 * left,
                moved=1e-4 * math.exp(noise * chance.gauss(0, 1)),
                rows=(row(chance.randrange(100), 0.2 * norm),),
            )
        )
    return steps


def record(steps: Iterable[Step], rank: int = 0, gaps: Sequence[Gap] = (), **facts: Any) -> RankRecord:
    values: dict[str, Any] = {"tokens": {TOKEN: " foo\x1b[31m"}, "num_sampled": 4096}
    return RankRecord(facts=RunFacts(rank=rank, **{**values, **facts}), steps=tuple(steps), gaps=tuple(gaps))


def run(*ranks: Iterable[Step] | RankRecord, is_live: bool = False, **facts: Any) -> RunRecord:
    """One record a rank; several share `parallelism` and `world_size`."""
    shared = {"world_size": len(ranks), "parallelism": "DDP", **facts} if len(ranks) > 1 else facts
    made = [r if isinstance(r, RankRecord) else record(r, i, **shared) for i, r in enumerate(ranks)]
    return RunRecord(ranks=tuple(made), is_live=is_live)


def put(steps: list[Step], *others: Step) -> list[Step]:
    """These steps in the place of those with their numbers."""
    by_number = {s.number: s for s in others}
    return [by_number.get(s.number, s) for s in steps]


def every(steps: list[Step], **changes: Any) -> list[Step]:
    return [replace(s, **changes) for s in steps]


def window(whole: RunRecord, start: int, stop: int) -> RunRecord:
    """What a live watch sees of it."""
    return RunRecord(ranks=tuple(replace(r, steps=r.steps[start:stop]) for r in whole.ranks), is_live=True)
