"""A key padding mask the wrong way round: real tokens may look at padding only, and find none.

## What people see
The loss of batches with padding hardly falls; without padding all is well.

## What really happens
`nn.MultiheadAttention` wants True where a key is ignored, `scaled_dot_product_attention` True where it takes part. The mask
of the one was handed to the other: in a text padded on the right no real token has a visible key, and attention returns
zeros.

## The cure
Say what True means in the name (`visible_BT`, `ignored_BT`) and invert: `visible_BT = ~ignored_BT`.
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


class Masked(Decoder):
    """`inverted`: padding takes part and real tokens do not."""

    def __init__(self, *, inverted: bool) -> None:
        super().__init__()
        self.inverted = inverted

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        t = input_ids.shape[1]
        real_BT = attention_mask.bool()
        chosen_BT = ~real_BT if self.inverted else real_BT
        visible = chosen_BT[:, None, None, :] & torch.ones(t, t, dtype=torch.bool).tril()
        logits = self.head(self.attend(self.tokens(input_ids) + self.places(torch.arange(t)), visible))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    """a b a b a b ...: the next token is the one before the last, so it takes context to know it."""
    pair = torch.randint(2, V, (8, 2), generator=torch.Generator().manual_seed(seed))
    ids = pair.repeat(1, 6)
    attended = torch.ones_like(ids)
    attended[:, 9:] = 0
    ids[attended == 0] = 0
    return {"input_ids": ids, "labels": ids.clone().masked_fill(attended == 0, -100), "attention_mask": attended}


def broken() -> dict[str, Any]:
    """True means ignored."""
    return {"model": Masked(inverted=True), "batch": make_batch(0), "pad_token_id": 0}


def cured() -> dict[str, Any]:
    """True means visible."""
    return {"model": Masked(inverted=False), "batch": make_batch(0), "pad_token_id": 0}


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
