"""A padding mask takes the place of the causal one, and every position reads the answer.

## What people see
The training loss falls to almost nothing within minutes, the validation loss too. What the model writes is rubbish.

## What really happens
`scaled_dot_product_attention` takes either `is_causal` or `attn_mask`. Someone passed the padding mask as `attn_mask`, so that
nothing hides later tokens any more: the next token is in view of the position that has to predict it.

## The cure
Combine both: `padding[:, None, None, :] & torch.ones(T, T).tril().bool()`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "nats under the loss that these random tokens allow (ln 24 = 3.18), after 60 steps"
HARMLESS = 0.3
V, D, HEADS = 24, 32, 4


class Decoder(nn.Module):
    """One layer of attention. `causal` says whether the padding mask is combined with the causal one."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(64, D)
        self.mix, self.out, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D)
        self.head, self.causal = nn.Linear(D, V, bias=False), causal

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        b, t = input_ids.shape
        x = self.tokens(input_ids) + self.places(torch.arange(t))
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, dim=-1))
        visible = attention_mask.bool()[:, None, None, :].expand(b, 1, t, t)
        if self.causal:
            visible = visible & torch.ones(t, t, dtype=torch.bool).tril()
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).reshape(b, t, D))
        logits = self.head(x)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    """Random tokens, which nobody can predict; the second text is shorter."""
    ids = torch.randint(2, V, (8, 12), generator=torch.Generator().manual_seed(seed))
    attended = torch.ones_like(ids)
    attended[1, 9:] = 0
    ids[attended == 0] = 0
    return {"input_ids": ids, "attention_mask": attended, "labels": ids.masked_fill(attended == 0, -100)}


def make(*, causal: bool) -> dict[str, Any]:
    """The setup."""
    return {"model": Decoder(causal=causal), "batch": make_batch(0), "pad_token_id": 0}


def broken() -> dict[str, Any]:
    """The padding mask alone."""
    return make(causal=False)


def cured() -> dict[str, Any]:
    """Padding and future."""
    return make(causal=True)


def harm(setup: dict[str, Any]) -> float:
    """Train on fresh random tokens each step: no honest model gets under the entropy."""
    model = setup["model"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for step in range(60):
        optimizer.zero_grad()
        loss = model(**make_batch(step)).loss
        loss.backward()
        optimizer.step()
    fresh = model(**make_batch(10_000)).loss
    return float(torch.tensor(V - 2.0).log() - fresh.detach())
