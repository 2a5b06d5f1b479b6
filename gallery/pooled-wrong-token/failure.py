"""The last position of right-padded texts: the vector is that of a PAD token.

## What people see
Retrieval is poor for short texts and fine for the longest of each batch.

## What really happens
`hidden[:, -1]` is the last token only if texts are padded on the left. On the right it is padding.

## The cure
Take the last real token: `hidden[arange(B), attention_mask.sum(1) - 1]`, or pad on the left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

HARM = "1 - cosine between the vectors of a text alone and in a batch of longer ones"
HARMLESS = 1e-4
V, D, HEADS = 200, 32, 4


class Embedder(nn.Module):
    """Texts to vectors, by an encoder that ignores padding as it should."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places, self.pool = nn.Embedding(V, D), nn.Embedding(64, D), pool
        layer = nn.TransformerEncoderLayer(D, HEADS, 2 * D, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(D), enable_nested_tensor=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        x = self.layers(x, src_key_padding_mask=attention_mask == 0)
        last = attention_mask.sum(dim=1) - 1 if self.pool == "last real token" else torch.tensor(-1)
        return x[torch.arange(len(x)), last]


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Example i and example i + 4 say the same: find it among the batch."""
    vectors = functional.normalize(model(batch["input_ids"], batch["attention_mask"]), dim=-1)
    return functional.cross_entropy(vectors[:4] @ vectors[4:].T / 0.05, torch.arange(4))


def make(pool: str) -> dict[str, Any]:
    """Eight texts of 5 to 12 tokens, padded on the right."""
    ids = torch.randint(2, V, (8, 12), generator=torch.Generator().manual_seed(0))
    attended = (torch.arange(12)[None] < torch.tensor([12, 5, 9, 7, 6, 11, 8, 10])[:, None]).long()
    batch = {"input_ids": ids * attended, "attention_mask": attended}
    return {"model": Embedder(pool), "batch": batch, "loss_fn": loss_fn, "pad_token_id": 0, "intent": "contrastive"}


def broken() -> dict[str, Any]:
    """The last position."""
    return make("last position")


def cured() -> dict[str, Any]:
    """The last real token."""
    return make("last real token")


def harm(setup: dict[str, Any]) -> float:
    """The vector of the shortest text in the batch against the same text alone."""
    model, batch = setup["model"], setup["batch"]
    with torch.no_grad():
        together = model(batch["input_ids"], batch["attention_mask"])[1]
        alone = model(batch["input_ids"][1:2, :5], batch["attention_mask"][1:2, :5])[0]
    return float(1 - functional.cosine_similarity(together, alone, dim=0))
