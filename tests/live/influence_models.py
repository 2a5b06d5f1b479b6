"""A small language model of our own with every mask fault as a switch, and what runs the mask checks on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ghoststep.engine import Case, ask
from ghoststep.finding import Outcome, Severity, Verdict
from ghoststep.registry import Registry, load
from ghoststep.subjects.setup import make_setup

V, D, H, T = 60, 32, 4, 16
PAD = 0

Mask = Callable[[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], "torch.Tensor | None"]


def triangle(length: int) -> torch.Tensor:
    return torch.ones(length, length).tril().bool()


def right(ids: torch.Tensor, keep: torch.Tensor | None, _: torch.Tensor | None) -> torch.Tensor:
    """The correct one: causal, PAD hidden as a key, every query sees itself. True = visible, [B, 1, T, T]."""
    visible = triangle(ids.shape[1]).expand(len(ids), 1, -1, -1)
    if keep is not None:
        visible = visible & keep.bool()[:, None, None, :]
    return visible | torch.eye(ids.shape[1]).bool()


class Attention(nn.Module):
    def __init__(self, *, eager: bool, zero: bool, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.eager, self.p = nn.Linear(D, 3 * D), nn.Linear(D, D), eager, dropout
        if zero:
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        if not self.eager:
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None)
        else:
            assert mask is not None
            scores = q @ k.transpose(-1, -2) / (D // H) ** 0.5
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
            y = functional.dropout(scores.softmax(-1), p, self.training) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, D))  # type: ignore[no-any-return]


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class TinyLM(nn.Module):
    """mask: what queries see. absolute: learned positions by index (or by position_ids where given). mix: applied to the hidden
    states [B, T, D] between the layers."""

    def __init__(
        self, mask: Mask = right, *, eager: bool = False, zero: bool = False, dropout: float = 0.0, absolute: bool = True,
        layers: int = 2, mix: nn.Module | None = None, scale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed, self.pos = nn.Embedding(V, D), nn.Embedding(4 * T, D)
        self.layers = nn.ModuleList(Attention(eager=eager, zero=zero, dropout=dropout) for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(layers + 1))
        self.head = nn.Linear(D, V, bias=False)
        self.mask, self.absolute, self.mix, self.scale = mask, absolute, mix, scale

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Output:  # fmt: skip
        index = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        x = self.embed(input_ids) + (self.pos(index) if self.absolute else 0.0)
        mask = self.mask(input_ids, attention_mask, position_ids)
        for i in range(len(self.layers)):
            x = x + self.scale * self.layers[i](self.norms[i](x), mask)
            if i == 0 and self.mix is not None:
                x = self.mix(x)
            x = x + self.mlps[i](x)
        logits = self.head(self.norms[-1](x))
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1), ignore_index=-100)
        return Output(logits=logits, loss=loss)


def lm_batch(*, side: str = "right", mask: bool = True, examples: int = 4, length: int = T) -> dict[str, torch.Tensor]:
    """Random tokens; all but the first example padded."""
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(3, V, (examples, length), generator=g)
    lengths = torch.tensor([length - 3 * (i % 3) for i in range(examples)])
    keep = torch.arange(length) < lengths[:, None]
    keep = keep.flip(1) if side == "left" else keep
    ids = ids.masked_fill(~keep, PAD)
    batch = {"input_ids": ids, "labels": ids.masked_fill(~keep, -100)}
    return {**batch, "attention_mask": keep.long()} if mask else batch


def packed_batch(*, ones: bool = False) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(3, V, (3, T), generator=g)
    positions = torch.cat([torch.arange(6), torch.arange(T - 6)]).repeat(3, 1)
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
    return {**batch, "attention_mask": torch.ones_like(ids)} if ones else batch


@cache
def registry() -> Registry:
    return load(plugins=False)


def verdicts(model: nn.Module, batch: dict[str, torch.Tensor], *, fast: bool = False, **more: Any) -> dict[str, Verdict]:
    """Every mask check on a setup, through the engine."""
    setup = make_setup({"model": model, "batch": batch, "pad_token_id": PAD, **more}, fast=fast)
    case = Case([setup], registry().instruments)
    checks = [c for c in registry().checks if c.module.startswith("ghoststep.checks.mask")]
    return {c.code: ask(case, c) for c in checks}


def bad(found: dict[str, Verdict]) -> set[str]:
    """Codes with an error, a warning or a defect."""
    return {
        v.code
        for v in found.values()
        if v.outcome is Outcome.BROKEN or (v.outcome is Outcome.FOUND and v.severity is not Severity.NOTE)
    }


def seeded(make: Callable[[], nn.Module], *, train: bool = True, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make().train(train)


def parameters_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from (p.detach().clone() for p in model.parameters())
