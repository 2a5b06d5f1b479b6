"""Faults of sentence encoders (GS110, GS111, GS507, GS508)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.mutations import harm
from tests.mutations.architectures import (
    Arch,
    Setup,
    standard,
)
from tests.mutations.fault import Fault
from tests.mutations.planting import (
    on,
)
from tests.mutations.vocab_faults import table_fault


def pooled(change: Callable[[Any], Callable[[Tensor, Tensor], Tensor]]) -> Callable[[Arch], Setup]:
    """A sentence encoder with another pooling."""

    def make(arch: Arch) -> Setup:
        model: Any = arch.build()
        model.pool = change(model)
        return standard(arch, model=model)

    return make


def over_all(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean over all positions, PAD included."""
    return lambda hidden, attention_mask: hidden.mean(1)


def at_the_end(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The last column, which is a PAD under right padding."""
    return lambda hidden, attention_mask: hidden[:, -1]


def scale_of(value: float) -> Callable[[Arch], Setup]:
    """The logit scale starts at exp(value)."""

    def make(arch: Arch) -> Setup:
        model: Any = arch.build()
        with torch.no_grad():
            model.logit_scale.fill_(value)
        return standard(arch, model=model)

    return make


def loss_floor(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """The loss of perfect pairs under this scale (cosine 1 for the pair, −1/(B−1) for the others), over ln B."""
    scale, B = broken["model"].logit_scale.exp().item(), 8
    return math.log(1 + (B - 1) * math.exp(-scale * B / (B - 1))) / math.log(B)


def duplicates(arch: Arch) -> Setup:
    """The same second sentence for two examples, each a negative of the other."""
    batches = [arch.batch(s) for s in range(3)]
    for batch in batches:
        for key in ("positive_ids", "positive_mask"):
            batch[key][1::2] = batch[key][0::2]
    return standard(arch, batches=batches)


def impossible_share(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """ln 2 an example with a twin, over ln B: the loss that no encoder can go below."""
    ids = broken["batches"][0]["positive_ids"]
    same = (ids[:, None] == ids[None]).all(-1).sum(1)
    return float(same.float().log().mean()) / math.log(len(ids))


def _pools(kind: str) -> Callable[[Arch], bool]:
    return lambda arch: arch.name.endswith(f"_{kind}")


def _contrasts(arch: Arch) -> bool:
    return arch.intent == "contrastive"


FAULTS: tuple[Fault, ...] = (
    table_fault(
        "pads_pooled",
        "GS110",
        on(_pools("mean"), pooled(over_all)),
        standard,
        harm.padding_share,
        1e-3,
        "share of a PAD",
        "encoders",
    ),
    table_fault(
        "pad_is_last_token",
        "GS111",
        on(_pools("last"), pooled(at_the_end)),
        standard,
        harm.output_change,
        0.1,
        "of the vector",
        "encoders",
    ),
    table_fault(
        "scale_too_low", "GS507", on(_contrasts, scale_of(0.0)), standard, loss_floor, 0.2, "lowest loss over ln B", "encoders"
    ),
    table_fault(
        "duplicate_positives",
        "GS508",
        on(_contrasts, duplicates),
        standard,
        impossible_share,
        0.1,
        "lowest loss over ln B",
        "encoders",
    ),
)
