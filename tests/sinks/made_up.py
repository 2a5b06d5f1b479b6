"""Steps as the watch would hand them over: a healthy one, and one that a clip to an infinite norm zeroed."""

from __future__ import annotations

import math

from ghoststep.evidence.steps import RunFacts, Step, StepRow

FACTS = RunFacts(
    run_id="run-a", model="Mamba2ForCausalLM", num_parameters=73_344, versions={"torch": "2.13.0"}, optimizers=("AdamW",)
)
ON_RANK_1 = RunFacts(run_id="run-a", rank=1, world_size=2)


def healthy(number: int) -> Step:
    return Step(
        number=number, ended_at=1_700_000_000.0 + number, seconds=0.25, num_tokens=32, loss=5.0 - number / 100, norm=2.0,
        tables_norm=1.0, trunk_norm=math.sqrt(3.0), norm_after=1.0, trunk_norm_after=0.75, num_gradients=9, lrs=(1e-3, 1e-4),
        moved=1e-4, clip_bound=1.0, rows=(place(5, 0.5), place(6, 0.25)),
    )  # fmt: skip


def zeroed(number: int) -> Step:
    return Step(
        number=number, ended_at=1_700_000_000.0 + number, seconds=0.25, num_tokens=32, loss=5.0, norm=math.inf,
        norm_after=0.0, num_gradients=9, num_zero_after=9, lrs=(1e-3, 1e-4), clip_bound=1.0, rows=(place(5, 0.5), place(17, 1e26)),
    )  # fmt: skip


def place(token_id: int, norm: float) -> StepRow:
    return StepRow(
        table="embeddings", token_id=token_id, micro_batch=0, example=1, position=8, gradient_norm=norm, row_norm_before=1e-30
    )


def run(count: int = 32, lost: int = 20) -> list[Step]:
    """One flush: `count` steps of which number `lost` was zeroed."""
    return [zeroed(n) if n == lost else healthy(n) for n in range(1, count + 1)]
