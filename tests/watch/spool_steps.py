"""Steps made from their number alone, so that what was written can be made again and compared bit for bit."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

import msgspec

from ghoststep.evidence.steps import RunFacts, Step, StepOutcome, StepRow, TableFacts, TensorOutlier
from ghoststep.evidence.training import OptimizerGroup

NAMES = tuple(f"model.layers.{i}.mlp.weight" for i in range(40))
_ODD = (math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308)


def make_step(number: int, *, norms: int = 0, **more: Any) -> Step:
    """The step of this number; every third one with rows, every seventh one odd."""
    chance = random.Random(number)
    rows = tuple(
        StepRow(table="model.embed.weight", token_id=chance.randrange(50_000), micro_batch=i, example=i, position=chance.randrange(999),
                gradient_norm=chance.expovariate(1), row_norm_before=chance.random(), row_norm_after=None)
        for i in range(4 if number % 3 == 0 else 1)
    )  # fmt: skip
    given: dict[str, Any] = {
        "number": number, "ended_at": 1.7e9 + number * 0.3, "seconds": 0.3 + chance.random() / 100,
        "outcome": StepOutcome.SKIPPED_BY_SCALER if number % 11 == 0 else StepOutcome.STEPPED, "num_tokens": 1024,
        "loss": chance.choice(_ODD) if number % 7 == 0 else chance.gauss(3, 0.1), "norm": chance.random(),
        "tables_norm": chance.random(), "trunk_norm": chance.random(), "norm_after": chance.random(),
        "trunk_norm_after": chance.random(),
        "num_gradients": 40,
        "lrs": (1e-4, chance.random()), "moved": chance.random() * 1e-4, "clip_bound": 1.0, "rows": rows,
        "nonfinite_before": NAMES[:2] if number % 7 == 0 else (), "num_graph_nodes": number if number % 5 == 0 else None,
        "outliers": (TensorOutlier(parameter=NAMES[3], norm=chance.random(), typical=0.1),) if number % 13 == 0 else (),
        "norms": chance.randbytes(4 * norms),
    }  # fmt: skip
    return Step(**{**given, **more})


def make_steps(numbers: Iterable[int], **more: Any) -> list[Step]:
    return [make_step(n, **more) for n in numbers]


def make_facts(rank: int = 0, **more: Any) -> RunFacts:
    given: dict[str, Any] = {
        "run_id": "run-a", "rank": rank, "started_at": 1.7e9, "versions": {"torch": "2.4"}, "model": "LlamaForCausalLM",
        "num_parameters": 1000, "trainable": NAMES,
        "tables": (TableFacts(name="model.embed.weight", num_rows=50_000, num_dims=64, is_trainable=True, is_tied=False),),
        "groups": (
            OptimizerGroup(index=0, optimizer="AdamW", lr=1e-4, initial_lr=None, weight_decay=0.1, num_tensors=40, num_frozen=0),
        ),
    }  # fmt: skip
    return RunFacts(**{**given, **more})


def bits(steps: Iterable[Step]) -> list[bytes]:
    """Each step as bytes: NaN equals NaN, and 0.0 is not -0.0."""
    return [msgspec.msgpack.encode(s) for s in steps]
