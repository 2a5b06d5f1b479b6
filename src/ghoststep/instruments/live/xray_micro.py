"""The weight of one token in each micro-batch of an accumulation window, and in a batch that is made uneven.

B examples, T positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.loss import LossXray, UnevenTrial, WeightAcrossMicroBatches
from ghoststep.instruments.live.batch_facts import LABEL_NAMES, grid
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.xray_heads import main_head
from ghoststep.instruments.live.xray_passes import Look, NothingFedError, Reading, read_twice
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup
from ghoststep.subjects.setup_batches import Batch, PlacedBatch

if TYPE_CHECKING:
    import torch

COUNT = "num_items_in_batch"
"""The argument by which transformers' Trainer tells a model how many tokens the window has."""
IGNORED = -100


@instrument
def weight_across_micro_batches(setup: Setup, call: LiveCall) -> WeightAcrossMicroBatches:
    """The loss X-ray's weights for each batch of one window.

    Cost: one forward a micro-batch (at most 4), no backward; twice that where the model's own loss takes the window's count.
    """
    if setup.accumulation_steps < 2:
        raise DoesNotApply("accumulation_steps is 1: every batch is a step of its own")
    batches = setup.batches[: min(setup.accumulation_steps, 2 if setup.fast else 4)]
    if len(batches) < 2:
        raise CannotLook("the setup has one batch; give at least two in `batches` to compare micro-batches")
    if call.head is None:
        raise CannotLook("the loss never calls a head, so weights across micro-batches were not measured")
    looks = [_look(setup, call, batch, first=batch is setup.batches[0]) for batch in batches]
    found = [_weights(look) for look in looks]
    weights, counts = [w for w, _ in found], [n for _, n in found]
    counted: list[float] = []
    if len(set(counts)) > 1 and _takes_count(setup, call, batches):
        counted = [_weights(_with_count(look, sum(counts)))[0] for look in looks]
    full = [sum(s[0] * (s[1] - 1) for s in look.grid) for look in looks]
    return WeightAcrossMicroBatches(
        weights=tuple(weights), num_tokens=tuple(counts), accumulation_steps=setup.accumulation_steps,
        counted_weights=tuple(counted), all_trained=all(n >= most for n, most in zip(counts, full, strict=True)),
    )  # fmt: skip


@instrument
def uneven_trial(setup: Setup, call: LiveCall, xray: LossXray) -> UnevenTrial:
    """Leave out half of the labels of one example in a copy of the batch and read the weights again. Cost: one forward."""
    if not xray.kind.is_likelihood:
        raise DoesNotApply(f"the loss is {xray.kind.value}")
    counts = [sum(1 for w in row if w) for row in xray.weight_BT.tolist()]
    trained = [b for b, n in enumerate(counts) if n]
    if len(trained) < 2 or len({counts[b] for b in trained}) > 1:
        raise DoesNotApply("one example is trained" if len(trained) < 2 else "the examples differ in their numbers already")
    if setup.fast:
        raise CannotLook("--fast does not run the loss on a changed batch")
    if call.head is None or len(call.calls) != 1:
        raise CannotLook("the loss does not call the model and its head once, so a changed batch cannot be compared")
    batch = setup.batches[0]
    name, labels = _labels(batch, xray.weight_BT.shape)
    changed = labels.clone()
    example = trained[0]
    mine = (labels[example] >= 0).nonzero().flatten()
    changed[example, mine[: len(mine) // 2]] = IGNORED
    look = _look(setup, call, _replaced(batch, name, changed), first=True)
    try:
        reading = _read(look)
    except CannotLook:
        raise
    except Exception as error:  # the user's own code, which ran before: it cannot ignore a label
        raise CannotLook(f"the loss raised when labels were set to {IGNORED}: {type(error).__name__}") from error
    weights = _by_example(reading, xray.weight_BT.shape)
    own, others = weights[example], [weights[b] for b in trained[1:]]
    if not own or not all(others) or len(own) >= counts[example]:
        raise CannotLook("leaving out labels did not change which positions carry loss")
    other = sum(sum(o) / len(o) for o in others) / len(others)
    return UnevenTrial(
        example=example, num_tokens=len(own), num_others=counts[example], ratio=sum(own) / len(own) / other if other else 0.0
    )


def _look(setup: Setup, call: LiveCall, batch: Batch, *, first: bool) -> Look:
    import torch

    tensors = [v for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() >= 2]
    shapes = [i.shape for i in grid(call, setup.intent)] if first else [t.shape[:2] for t in tensors[:1]]
    return Look(
        setup=setup, batch=batch, core=call.core, modules=[main_head(call)], embedding=call.embedding, grid=shapes,
        num_classes=call.num_classes,
    )  # fmt: skip


def _weights(look: Look) -> tuple[float, int]:
    """Mean weight of a counted token, and their number."""
    reading = _read(look)
    found = [abs(float(w)) for rows in (reading.rows if reading else []) for w in rows.weight if w]
    return (sum(found) / len(found) if found else 0.0), len(found)


def _read(look: Look) -> Reading | None:
    try:
        reading = read_twice(look, once=True)
    except NothingFedError:
        return None
    if reading.recipe != "log-softmax node":
        raise CannotLook("the loss has no log-softmax, so weights across micro-batches were not measured")
    return reading


def _by_example(reading: Reading | None, shape: tuple[int, ...]) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in range(shape[0])]
    for rows in reading.rows if reading else []:
        for place, weight in zip(rows.places.tolist(), rows.weight.tolist(), strict=True):
            if weight and place >= 0:
                found[place // shape[1]].append(abs(weight))
    return found


def _takes_count(setup: Setup, call: LiveCall, batches: tuple[Batch, ...]) -> bool:
    """True where the loss is the model's own and Trainer would hand it the window's count of tokens.

    Trainer asks `accepts_loss_kwargs` of the model, else whether its forward takes further named arguments.
    """
    if setup.loss_fn is not None or setup.train_step is not None:
        return False
    if any(isinstance(b, PlacedBatch) or COUNT in b for b in batches):
        return False
    inner: Any = getattr(call.core, "get_base_model", lambda: call.core)()
    said = getattr(inner, "accepts_loss_kwargs", None)
    if isinstance(said, bool):
        return said
    parameters = inspect.signature(inner.forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD or p.name == COUNT for p in parameters)


def _with_count(look: Look, count: int) -> Look:
    import torch

    batch = _replaced(look.batch, COUNT, torch.tensor(count))
    return Look(
        setup=look.setup, batch=batch, core=look.core, modules=look.modules, embedding=look.embedding, grid=look.grid,
        num_classes=look.num_classes,
    )  # fmt: skip


def _labels(batch: Batch, shape: tuple[int, ...]) -> tuple[str, torch.Tensor]:
    import torch

    for name in LABEL_NAMES:
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and tuple(value.shape) == tuple(shape):
            return name, value
    raise CannotLook(f"the batch has no labels [B, T] under a known name ({', '.join(LABEL_NAMES)})")


def _replaced(batch: Batch, name: str, value: torch.Tensor) -> Batch:
    """A copy of the batch of the same class (dict, BatchEncoding) with one entry put in."""
    import copy

    if isinstance(batch, PlacedBatch):
        raise CannotLook("the batch is a tuple, whose entries have no names")
    changed: Any = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
    changed[name] = value
    assert isinstance(changed, Mapping)
    return changed
