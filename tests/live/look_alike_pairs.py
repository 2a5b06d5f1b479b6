"""Look-alikes among contrastive losses: unnormalised, with a learned scale, with a bias, untrained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.live.look_alike_setups import Given, setup


class Tower(nn.Module):
    """Two calls of one encoder; `kind` is what its similarities go through."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix, self.kind = nn.Embedding(300, 24), nn.Linear(24, 24), kind
        self.scale, self.bias = nn.Parameter(torch.tensor(2.6)), nn.Parameter(torch.tensor(-5.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.mix(self.table(ids).mean(1))
        return pooled if self.kind == "dot" else functional.normalize(pooled, dim=-1)


def _pair_loss(model: Any, b: Given) -> torch.Tensor:
    sims = model(b["a"]) @ model(b["p"]).T
    target = torch.arange(len(sims))
    if model.kind == "sigmoid":
        signs = 2 * torch.eye(len(sims)) - 1
        return -functional.logsigmoid(signs * (sims * model.scale.exp() + model.bias)).sum() / len(sims)
    if model.kind == "scale":
        logits = sims * model.scale.exp()
        return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)) / 2
    return functional.cross_entropy(sims if model.kind == "dot" else 20 * sims, target)


def _pair_batch(seed: int, *, doubled: bool = False) -> Given:
    g = torch.Generator().manual_seed(seed)
    a, p = torch.randint(0, 300, (16, 5), generator=g), torch.randint(0, 300, (16, 7), generator=g)
    if doubled:
        p[8:] = p[:8]
    return {"a": a, "p": p}


def pairs(kind: str, *, doubled: bool = False) -> Given:
    model: Any = Tower(kind)
    if kind != "sigmoid":
        del model.bias
    if kind in ("dot", "cosine"):
        del model.scale
    batches = [_pair_batch(seed, doubled=doubled) for seed in (0, 1)]
    return setup(model, batches=batches, loss_fn=_pair_loss, tokenizer=None, intent="contrastive") | {"tokenizer": None}


def untrained_pairs() -> Given:
    """All embeddings nearly equal: the loss stands at ln B."""
    given = pairs("cosine")
    with torch.no_grad():
        given["model"].mix.weight.mul_(0.01)
    return given


def doubled_pairs() -> Given:
    return pairs("cosine", doubled=True)
