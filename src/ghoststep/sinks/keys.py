"""A step as numbers under fixed keys: the same in every sink."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ghoststep.evidence.steps import Step, StepOutcome, StepRow

PREFIX = "ghoststep"
STEP = f"{PREFIX}/steps/number"

KEYS: Mapping[str, str] = {
    "loss/value": "mean loss over the micro-batches, free of the loss scale",
    "loss/graph_nodes": "nodes of the loss's autograd graph, in the steps where they were counted",
    "gradient/norm_before": "L2 norm of all gradients of this rank before clipping, in float32 (inf where the squares overflow)",
    "gradient/norm_after": "the same, of what the optimizer was given",
    "gradient/tables_norm": "of the embedding tables, before clipping",
    "gradient/trunk_norm": "of everything else, before clipping",
    "gradient/trunk_norm_after": "of everything else, after clipping",
    "gradient/tensors": "tensors with a gradient",
    "gradient/zero_tensors_before": "of those, tensors whose gradient is exactly zero before clipping",
    "gradient/zero_tensors_after": "... after clipping",
    "gradient/nonfinite_tensors_before": "tensors with inf or NaN in the gradient before clipping",
    "gradient/nonfinite_tensors_after": "... after clipping",
    "gradient/outlier_tensors": "tensors whose gradient norm left its own history",
    "gradient/clip_bound": "max_norm of the clip that ran",
    "rows/largest_gradient": "gradient norm of the place in the batch with the largest one, at the embedding's output",
    "rows/token_id": "the token there",
    "rows/micro_batch": "its micro-batch, from 0",
    "rows/example": "its example in the micro-batch, from 0",
    "rows/position": "its position in the example, from 0",
    "rows/norm_before": "norm of its table row before the step",
    "rows/norm_after": "... after the step",
    "steps/number": "the step, from 1",
    "steps/lost": "1 if the optimizer stepped with nothing left to learn from, else 0 (see `is_lost`)",
    "steps/skipped": "1 if the step was skipped by the loss scaler or by ghoststep, else 0",
    "steps/seconds": "since the end of the step before",
    "steps/tokens": "ids looked up in the input tables on this rank",
    "steps/micro_batches": "micro-batches accumulated",
    "optimizer/lr_N": "learning rate of parameter group N",
    "optimizer/loss_scale": "the loss scale during the step",
    "weights/moved": "norm of the change over the norm, of a fixed sample of weights",
}
"""Key without the prefix `ghoststep/` → what it is. The embedding place with the largest gradient is the family `rows`."""

_SUMMED = ("steps/lost", "steps/skipped", "steps/seconds", "steps/tokens", "steps/micro_batches")
_LARGEST = ("gradient/",)


def metrics(step: Step) -> dict[str, float]:
    """Every number of a step that was seen, under `ghoststep/<family>/<quantity>`; what is None is left out, NaN and inf stay."""
    found: dict[str, float | None] = {
        "steps/number": step.number,
        "steps/lost": is_lost(step),
        "steps/skipped": step.outcome is not StepOutcome.STEPPED,
        "steps/seconds": step.seconds,
        "steps/tokens": step.num_tokens,
        "steps/micro_batches": step.num_micro_batches,
        "loss/value": step.loss,
        "loss/graph_nodes": step.num_graph_nodes,
        "gradient/norm_before": step.norm,
        "gradient/norm_after": step.norm_after,
        "gradient/tables_norm": step.tables_norm,
        "gradient/trunk_norm": step.trunk_norm,
        "gradient/trunk_norm_after": step.trunk_norm_after,
        "gradient/tensors": step.num_gradients,
        "gradient/zero_tensors_before": step.num_zero_before,
        "gradient/zero_tensors_after": step.num_zero_after,
        "gradient/nonfinite_tensors_before": step.num_nonfinite_before,
        "gradient/nonfinite_tensors_after": step.num_nonfinite_after,
        "gradient/outlier_tensors": len(step.outliers),
        "gradient/clip_bound": step.clip_bound,
        "optimizer/loss_scale": step.scale,
        "weights/moved": step.moved,
        **{f"optimizer/lr_{group}": lr for group, lr in enumerate(step.lrs)},
    }
    if step.rows:
        found.update(_place(max(step.rows, key=lambda row: _order(row.gradient_norm))))
    return {f"{PREFIX}/{key}": float(value) for key, value in found.items() if value is not None}


def is_lost(step: Step) -> bool:
    """True if the optimizer stepped, and what it was given teaches nothing.

    That is: an inf or NaN in a gradient, or every gradient exactly zero after clipping though some were not before it (gradients
    that are zero from the start, as in a policy-gradient batch of equal rewards, are not lost). Steps that are only crushed take
    a judgement: the checks give it, as an alarm.
    """
    if step.outcome is not StepOutcome.STEPPED:
        return False
    if step.num_nonfinite_after:
        return True
    return step.num_gradients > step.num_zero_before and step.num_zero_after == step.num_gradients


def summary(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Several steps as one, for a tracker that takes one: `steps/*` summed, `gradient/*` at its largest (NaN above all), `rows/*`
    of the step with the largest one, all others as they were last."""
    found: dict[str, float] = {}
    for step in steps:
        for key, value in step.items():
            name = key.removeprefix(f"{PREFIX}/")
            if key in found and name in _SUMMED:
                found[key] += value
            elif not (key in found and name.startswith(_LARGEST) and _order(value) < _order(found[key])):
                found[key] = value
    largest = f"{PREFIX}/rows/largest_gradient"
    places = [step for step in steps if largest in step]
    if places:
        found = {key: value for key, value in found.items() if not key.startswith(f"{PREFIX}/rows/")}
        worst = max(places, key=lambda step: _order(step[largest]))
        found.update({key: value for key, value in worst.items() if key.startswith(f"{PREFIX}/rows/")})
    return found


def alarm_key(code: str) -> str:
    """Where an alarm of a check is kept: "ghoststep/alarms/GS401"."""
    return f"{PREFIX}/alarms/{code}"


def _place(row: StepRow) -> dict[str, float | None]:
    return {
        "rows/largest_gradient": row.gradient_norm,
        "rows/token_id": row.token_id,
        "rows/micro_batch": row.micro_batch,
        "rows/example": row.example,
        "rows/position": row.position,
        "rows/norm_before": row.row_norm_before,
        "rows/norm_after": row.row_norm_after,
    }


def _order(value: float) -> tuple[bool, float]:
    """A sorting key under which NaN is the worst of all."""
    return (True, 0.0) if math.isnan(value) else (False, value)
