"""How faults are put into models and setups; shared by all families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.mutations.architectures import (
    BOS,
    EOS,
    Arch,
    Batch,
    Setup,
    standard,
)
from tests.mutations.attention import tamper
from tests.mutations.plain import MaskTransform

SHARE = "largest movement by what must be hidden, over the largest by the visible past"


Maker = Callable[[Arch], "Setup | None"]


def predicts_next(arch: Arch) -> bool:
    return arch.intent in ("causal", "seq2seq")


def has(arch: Arch, *traits: str) -> bool:
    return arch.traits.issuperset(traits)


def attends(arch: Arch) -> bool:
    return arch.intent != "seq2seq" and has(arch, "attention") and not has(arch, "hybrid")


def bidirectional(arch: Arch) -> bool:
    return arch.intent == "masked" or has(arch, "encoder")


def on(applies: Callable[[Arch], bool], make: Callable[[Arch], Setup]) -> Maker:
    """`make` where it applies, None elsewhere."""
    return lambda arch: make(arch) if applies(arch) else None


def tampered(transform: MaskTransform, gain: float = 1.0, side: str = "right") -> Callable[[Arch], Setup]:
    """A setup whose attention uses a changed mask."""

    def make(arch: Arch) -> Setup:
        return standard(arch, model=tamper(arch, arch.build(), transform, gain), side=side)

    return make


def layers(model: nn.Module) -> list[Any]:
    """The two layers (an encoder-decoder's: those of its decoder)."""
    return list([m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2 and _is_layer(m[0])][-1])


def _is_layer(module: nn.Module) -> bool:
    return any("orm" in type(m).__name__ for m in module.modules())


def mlps(model: nn.Module) -> list[Any]:
    return [m for n, m in model.named_modules() if n.rpartition(".")[2] in ("mlp", "feed_forward")]


def embedding(model: Any) -> nn.Embedding:
    """The input embedding."""
    found: nn.Embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else model.trunk.embed
    return found


def head(model: Any) -> Any:
    """The output head."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else model.head


def untied(arch: Arch) -> bool:
    """A causal model of full training with a head of its own."""
    return arch.intent == "causal" and not arch.traits & {"tied", "adapters"}


def is_causal(arch: Arch) -> bool:
    """A decoder-only language model."""
    return arch.intent == "causal"


def packed_batch(seed: int) -> Batch:
    """Two documents of unequal length an example; position ids restart; the first label of a document is ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 64, (4, 20), generator=generator)
    cuts = (7, 12, 9, 10)
    positions = torch.stack([torch.cat([torch.arange(c), torch.arange(20 - c)]) for c in cuts])
    ids[positions == 0] = BOS
    for i, c in enumerate(cuts):
        ids[i, c - 1] = ids[i, -1] = EOS
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
