"""A model without positions: the order of the words makes no difference.

## What people see
The loss falls nicely to a level that looks like the end. Answers know the words, not who did what.

## What really happens
The position embedding is computed and never added. Attention alone sees a bag of tokens.

## The cure
Add it: `x = tokens(ids) + places(torch.arange(T))`, or use rotary positions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "nats of loss left after 300 steps of naming the first of five tokens"
HARMLESS = 0.8
V, D, HEADS = 24, 32, 4


class Decoder(nn.Module):
    """One layer of attention; `visible` says which keys [batch, 1, query, key] a query may see."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(64, D)
        self.mix, self.out, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)

    def attend(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, dim=-1))
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        mixed: torch.Tensor = self.out(seen.transpose(1, 2).reshape(b, t, D))
        return x + mixed


class Ordered(Decoder):
    """`added`: the positions reach the model."""

    def __init__(self, *, added: bool) -> None:
        super().__init__()
        self.added = added

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        t = input_ids.shape[1]
        x, places = self.tokens(input_ids), self.places(torch.arange(t))
        if self.added:
            x = x + places
        logits = self.head(self.attend(x, torch.ones(t, t, dtype=torch.bool).tril()[None, None]))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    """Five different tokens, a question mark (1), and the first of the five, which alone is trained."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.stack([2 + torch.randperm(V - 2, generator=random)[:7] for _ in range(16)])
    ids[:, 5], ids[:, 6] = 1, ids[:, 0]
    labels = torch.full_like(ids, -100)
    labels[:, 6] = ids[:, 6]
    return {"input_ids": ids, "labels": labels}


def broken() -> dict[str, Any]:
    """Positions are left out."""
    return {"model": Ordered(added=False), "batch": make_batch(0)}


def cured() -> dict[str, Any]:
    """Positions are added."""
    return {"model": Ordered(added=True), "batch": make_batch(0)}


def harm(setup: dict[str, Any]) -> float:
    """Train on other texts of the same kind."""
    model = setup["model"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(300):
        optimizer.zero_grad()
        model(**make_batch(step)).loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(model(**make_batch(10_000)).loss)
