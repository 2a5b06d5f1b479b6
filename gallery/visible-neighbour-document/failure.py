"""Packed texts with restarting positions, and a mask that knows nothing of them.

## What people see
Training on packed texts is worse than on padded ones. Shuffling the pack changes the loss.

## What really happens
`position_ids` restart at each text, so the texts are meant to be separate; the attention mask is the plain causal one, and
every text reads the ones before it in the pack.

## The cure
Let a query see keys of its own text only: number the texts by the restarts and compare the numbers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "largest change of a logit of the second text when the first text is replaced"
HARMLESS = 1e-6
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
    """`separate`: texts do not see one another."""

    def __init__(self, *, separate: bool) -> None:
        super().__init__()
        self.separate = separate

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        t = input_ids.shape[1]
        visible = torch.ones(t, t, dtype=torch.bool).tril()[None, None]
        if self.separate:
            text_BT = (position_ids == 0).cumsum(dim=1)
            visible = visible & (text_BT[:, None, :, None] == text_BT[:, None, None, :])
        logits = self.head(self.attend(self.tokens(input_ids) + self.places(position_ids), visible))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def make(*, separate: bool) -> dict[str, Any]:
    """Three texts in each example; the first token of a text is nobody's target."""
    ids = torch.randint(2, V, (2, 18), generator=torch.Generator().manual_seed(0))
    places = torch.cat([torch.arange(n) for n in (7, 5, 6)]).repeat(2, 1)
    batch = {"input_ids": ids, "position_ids": places, "labels": ids.masked_fill(places == 0, -100)}
    return {"model": Packed(separate=separate), "batch": batch}


def broken() -> dict[str, Any]:
    """A causal mask over the whole pack."""
    return make(separate=False)


def cured() -> dict[str, Any]:
    """A causal mask within each text."""
    return make(separate=True)


def harm(setup: dict[str, Any]) -> float:
    """Replace the first text and look at the others."""
    model, batch = setup["model"], setup["batch"]
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, :7] = 2 + (other["input_ids"][:, :7] + 5) % (V - 2)
    with torch.no_grad():
        return float((model(**batch).logits - model(**other).logits)[:, 7:].abs().max())
