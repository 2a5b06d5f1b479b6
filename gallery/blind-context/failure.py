"""A document mask with one document a token: no position sees what came before it.

## What people see
The loss falls a little, to what the frequencies of single tokens give, and stays there. More layers do not help.

## What really happens
The mask for packed documents compares document numbers, and was given `position_ids` instead: no two positions share a
number, so each sees itself only.

## The cure
Compare document numbers: `document_BT[:, :, None] == document_BT[:, None, :]`, with the causal mask.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "nats of loss left after 120 steps on a text that context makes predictable"
HARMLESS = 1.0
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


class Packed(Decoder):
    """`numbers` is what the mask compares: the position (wrong) or the document (right)."""

    def __init__(self, numbers: str) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        t = input_ids.shape[1]
        positions = torch.arange(t)
        number = positions if self.numbers == "position" else torch.zeros(t)
        visible = (number[:, None] == number[None, :]) & torch.ones(t, t, dtype=torch.bool).tril()
        logits = self.head(self.attend(self.tokens(input_ids) + self.places(positions), visible[None, None]))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    """a b a b a b ...: the next token is the one before the last, so it takes context to know it."""
    pair = torch.randint(2, V, (8, 2), generator=torch.Generator().manual_seed(seed))
    ids = pair.repeat(1, 6)
    return {"input_ids": ids, "labels": ids.clone()}


def broken() -> dict[str, Any]:
    """The mask compares positions."""
    return {"model": Packed("position"), "batch": make_batch(0)}


def cured() -> dict[str, Any]:
    """The mask compares documents."""
    return {"model": Packed("document"), "batch": make_batch(0)}


def harm(setup: dict[str, Any]) -> float:
    """Train on other texts of the same kind."""
    model = setup["model"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(120):
        optimizer.zero_grad()
        model(**make_batch(step)).loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(model(**make_batch(10_000)).loss)
