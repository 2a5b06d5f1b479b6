"""The loss X-ray: what each position is really trained towards, from the gradient of the user's own loss at fed logits.

B examples, T positions, V classes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.base import Missing
from ghoststep.evidence.contrastive import ContrastiveXray
from ghoststep.evidence.loss import LossKind, LossXray
from ghoststep.instruments.live.batch_facts import grid
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.xray_heads import heads
from ghoststep.instruments.live.xray_hidden import read_hidden
from ghoststep.instruments.live.xray_passes import Look, NothingFedError, Reading, read_twice
from ghoststep.instruments.live.xray_path import log_odds_reached
from ghoststep.instruments.live.xray_streams import Stream, empty_stream, kind_of, put_together
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

MAX_RESIDUAL = 0.05
"""Above it a loss is not a cross-entropy of what was fed."""


_NOT_ASKED = Missing(reason="not asked")


@instrument
def loss_xray(setup: Setup, call: LiveCall, contrastive: ContrastiveXray | Missing = _NOT_ASKED) -> LossXray:
    """Feed known logits (or hidden states, where the loss never calls the head) and read the gradient.

    Cost: two forwards without activations and no backward through the model (three or more where the head is never called; one
    with `setup.fast` where the loss's graph itself proves a cross-entropy).
    Nothing is changed. Raises `CannotLook` where the setup gives no loss, where nothing of the loss depends on what was fed,
    or where rows cannot be placed.
    """
    if call.loss is None and setup.train_step is None:
        raise CannotLook(call.loss_error or "the setup gives no loss")
    if isinstance(contrastive, ContrastiveXray) and contrastive.kind is LossKind.CONTRASTIVE:
        raise DoesNotApply(f"the loss compares whole examples, {contrastive.form.value}: positions have no labels")
    if _one_answer_an_example(call):
        raise DoesNotApply(
            f"the model gives {call.num_classes} numbers for each example (classes or scores), not tokens: positions have no labels"
        )
    ids = grid(call, setup.intent)
    if not ids:
        raise CannotLook("no token ids reached an input embedding, so positions cannot be named")
    look = Look(
        setup=setup, batch=setup.batches[0], core=call.core, modules=heads(setup, call), embedding=call.embedding,
        grid=[i.shape for i in ids], num_classes=call.num_classes,
    )  # fmt: skip
    loss = math.nan if call.loss is None else float(call.loss)
    reading = _read(look, call, compares=isinstance(contrastive, ContrastiveXray))
    num_examples, width = sum(i.shape[0] for i in ids), max(i.shape[1] for i in ids)
    if reading is None:
        return _evidence([empty_stream(num_examples * width)], _nothing(call), loss, num_examples)
    streams = put_together(reading.rows, num_examples * width) or [empty_stream(num_examples * width)]
    seen = _evidence(streams, reading, loss, num_examples)
    if look.softmaxed and reading.recipe == "log-softmax node":
        return replace(seen, log_odds_reached=log_odds_reached(look, reading), num_forward=seen.num_forward + 1)
    return replace(seen, mixed_positions=look.mixed) if look.mixed else seen


def _read(look: Look, call: LiveCall, *, compares: bool = False) -> Reading | None:
    """Fed logits where a head is called and the loss depends on it, else fed hidden states; None if the loss is a constant."""
    called, refused, first = False, None, None
    if look.modules:
        try:
            first = _read_logits(look)
        except NothingFedError as nothing:
            called = nothing.called
        except CannotLook as reason:
            refused = reason
        except Exception as error:  # the user's own code, which ran before: it cannot work with what was fed
            refused = CannotLook(f"the loss raised with fed logits: {type(error).__name__}: {error}")
    if first is not None and (first.recipe != "fed logits" or first.residual <= MAX_RESIDUAL):
        return first
    # Where the head is bypassed, a wide feed-forward layer can look like one: the hidden state settles it.
    try:
        found = read_hidden(look, call)
    except (CannotLook, DoesNotApply):
        raise
    except Exception as error:  # as above
        found, refused = None, refused or CannotLook(f"the loss raised with fed hidden states: {type(error).__name__}: {error}")
    if found is not None and (first is None or found.residual < first.residual):
        return found
    if first is not None or called:
        return first
    if refused is not None:
        raise refused
    if compares or _compares_embeddings(look, call):
        raise DoesNotApply("no logits over a vocabulary: the loss compares embeddings, so positions have no labels")
    raise CannotLook(
        "the loss depends neither on a head's output nor on the last hidden states seen by hooks, so nothing could be fed"
    )


def _compares_embeddings(look: Look, call: LiveCall) -> bool:
    """Declared, or no head is called and no logits come out."""
    return look.setup.intent == "contrastive" or (call.head is None and call.logits is None)


def _one_answer_an_example(call: LiveCall) -> bool:
    """Logits [B, C] with C below the width of the embedding: classification, regression, a reward.

    [B, T] or [B, T - 1] are numbers of positions (log-probabilities of a fused head, values), not of examples.
    """
    weight, logits = getattr(call.embedding, "weight", None), call.logits
    if call.head is not None or logits is None or logits.dim() != 2 or weight is None or not call.ids:
        return False
    ids = call.ids[-1]
    num_examples, num_classes = logits.shape
    similarities = num_classes == num_examples  # of texts to texts or images, perhaps
    return (
        ids.dim() == 2
        and ids.shape[1] > 1
        and num_examples == ids.shape[0]
        and num_classes < weight.shape[1]
        and num_classes not in (ids.shape[1], ids.shape[1] - 1)
        and not similarities
    )


def _read_logits(look: Look) -> Reading:
    """Fed in float32, which is exact; in the model's own dtype where its code after the head accepts nothing else."""
    try:
        return read_twice(look)
    except RuntimeError:
        if all(p.dtype.itemsize >= 4 for p in look.core.parameters()):
            raise
        return read_twice(replace(look, keep_dtype=True))


def _nothing(call: LiveCall) -> Reading:
    return Reading(
        rows=[], residual=0.0, recipe="fed logits", num_classes=call.num_classes or 0, num_calls=len(call.head_outputs)
    )


def _evidence(streams: list[Stream], reading: Reading, loss: float, num_examples: int) -> LossXray:
    kind = kind_of(streams, reading.residual, reading.level)
    main, *rest = [s.further(num_examples) for s in streams]
    masked = _masked_classes(reading.masked_V)
    return LossXray(
        target_BT=main.target_BT, weight_BT=main.weight_BT, target_probability_BT=main.target_probability_BT,
        residual=0.0 if kind is LossKind.NOTHING else reading.residual, ambiguous_BT=main.ambiguous_BT, kind=kind,
        reading=reading.recipe, loss=loss, num_classes=reading.num_classes, num_head_calls=reading.num_calls,
        masked_classes=len(masked), smoothing_on_masked=reading.smoothing_on_masked,
        first_masked_class=masked[0] if masked else -1, num_nonfinite=reading.num_nonfinite, further=tuple(rest),
        num_forward=reading.num_forward,
    )  # fmt: skip


def _masked_classes(masked_V: torch.Tensor | None) -> list[int]:
    return [] if masked_V is None else [int(i) for i in masked_V.nonzero().flatten()]
