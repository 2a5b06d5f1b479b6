"""Documents are packed behind one another and cannot see each other, but the positions go on counting.

## What people see
Packing makes training three times as fast. The model then answers a prompt of its own worse than the loss promises.

## What really happens
A block-diagonal mask keeps the documents apart, as it should. Nobody passes `position_ids`, so with learned positions every document
but the first is trained at places that it never has when it is served alone.

## The cure
Pass `position_ids` that start again at 0 with every document.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

HARM = "largest change of a logit of the second document between the pack and alone"
HARMLESS = 1e-4
V = 48
FIRST = 6
"""Tokens of the first document."""


def make(*, restarting: bool) -> dict[str, Any]:
    """Two examples of two documents each."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))
    ids = torch.randint(3, V, (2, 14), generator=torch.Generator().manual_seed(0))
    document = (torch.arange(14) >= FIRST).long()
    visible = torch.ones(14, 14).tril().bool() & (document[:, None] == document)
    added = torch.zeros(14, 14).masked_fill(~visible, torch.finfo(torch.float32).min)
    labels = ids.clone()
    labels[:, FIRST] = -100  # nothing before it to predict it from
    batch = {"input_ids": ids, "attention_mask": added.expand(2, 1, 14, 14), "labels": labels}
    if restarting:
        batch["position_ids"] = torch.cat([torch.arange(FIRST), torch.arange(14 - FIRST)]).repeat(2, 1)
    return {"model": model, "batch": batch}


def broken() -> dict[str, Any]:
    """Positions that go on."""
    return make(restarting=False)


def cured() -> dict[str, Any]:
    """Positions that restart."""
    return make(restarting=True)


def harm(setup: dict[str, Any]) -> float:
    """The second document in the pack and alone."""
    model, batch = setup["model"].eval(), setup["batch"]
    given = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        together = model(**given).logits[:, FIRST:]
        alone = model(input_ids=batch["input_ids"][:, FIRST:]).logits
    return float((together - alone).abs().max())
