"""The weight of one token in each micro-batch of an accumulation window."""

from __future__ import annotations

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.loss import WeightAcrossMicroBatches
from ghoststep.instruments.live.batch_facts import grid
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.xray_heads import main_head
from ghoststep.instruments.live.xray_passes import Look, NothingFedError, Reading, read_twice
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup


@instrument
def weight_across_micro_batches(setup: Setup, call: LiveCall) -> WeightAcrossMicroBatches:
    """The loss X-ray's weights for each batch of one window. Cost: one forward a micro-batch (at most 4), no backward."""
    import torch

    if setup.accumulation_steps < 2:
        raise DoesNotApply("accumulation_steps is 1: every batch is a step of its own")
    batches = setup.batches[: min(setup.accumulation_steps, 2 if setup.fast else 4)]
    if len(batches) < 2:
        raise CannotLook("the setup has one batch; give at least two in `batches` to compare micro-batches")
    if call.head is None:
        raise CannotLook("the loss never calls a head, so weights across micro-batches were not measured")
    weights, counts = [], []
    for batch in batches:
        tensors = [v for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() >= 2]
        shapes = (
            [i.shape for i in grid(call, setup.intent)] if batch is setup.batches[0] else [t.shape[:2] for t in tensors[:1]]
        )
        look = Look(
            setup=setup, batch=batch, core=call.core, modules=[main_head(call)], embedding=call.embedding, grid=shapes,
            num_classes=call.num_classes,
        )  # fmt: skip
        reading = _read(look)
        found = [abs(float(w)) for rows in (reading.rows if reading else []) for w in rows.weight if w]
        counts.append(len(found))
        weights.append(sum(found) / len(found) if found else 0.0)
    return WeightAcrossMicroBatches(
        weights=tuple(weights), num_tokens=tuple(counts), accumulation_steps=setup.accumulation_steps
    )


def _read(look: Look) -> Reading | None:
    try:
        reading = read_twice(look, once=True)
    except NothingFedError:
        return None
    if reading.recipe != "log-softmax node":
        raise CannotLook("the loss has no log-softmax, so weights across micro-batches were not measured")
    return reading
