"""The attention mask is turned around: the model reads the padding and hides the words.

## What people see
The loss falls a little and stops early. The texts, the labels and the shapes are right.

## What really happens
The mask was made as `input_ids == pad`. The model obeys it: every position sees padding only, and learns how often each token
occurs, whatever stands around it.

## The cure
`attention_mask = (input_ids != pad).long()`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM

HARM = "loss of hidden tokens in nats, which their neighbours give away"
HARMLESS = 1.5
V, PAD, MASK, T = 16, 0, 1, 12


def tiny() -> BertForMaskedLM:
    """A one-layer encoder."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    no_dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=V, pad_token_id=PAD, **sizes, **no_dropout))


def make_batch(*, turned: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts that repeat one token behind the one before it: a hidden one is what the others are. All are padded."""
    token = torch.randint(2, V, (16, 1), generator=torch.Generator().manual_seed(seed))
    ids = token.repeat(1, T)
    ids[:, 0] = 2 + (token[:, 0] - 1) % (V - 2)
    ids[::2, 9:] = PAD
    ids[1::2, 10:] = PAD
    chosen = torch.zeros(ids.shape, dtype=torch.bool)
    chosen[:, [4, 7]] = True
    labels = ids.masked_fill(~chosen, -100)
    ids = ids.masked_fill(chosen, MASK)
    kept = (ids == PAD) if turned else (ids != PAD)
    return {"input_ids": ids, "attention_mask": kept.long(), "labels": labels}


def make(*, turned: bool) -> dict[str, Any]:
    """The setup."""
    return {"model": tiny(), "batch": make_batch(turned=turned), "pad_token_id": PAD, "intent": "masked"}


def broken() -> dict[str, Any]:
    """1 at padding."""
    return make(turned=True)


def cured() -> dict[str, Any]:
    """1 at text."""
    return make(turned=False)


def harm(setup: dict[str, Any]) -> float:
    """The loss of fresh texts after training under the same mask."""
    model = setup["model"]
    turned = bool(setup["batch"]["attention_mask"][0, 0] == 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(80):
        optimizer.zero_grad()
        model(**make_batch(turned=turned, seed=step)).loss.backward()
        optimizer.step()
    with torch.no_grad():
        batch = make_batch(turned=turned, seed=10_000)
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return float(functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
