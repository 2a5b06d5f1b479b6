"""Two begin tokens: the chat template writes one and the tokenizer another.

## What people see
Nothing in training. What is served is a little worse than what was evaluated.

## What really happens
The template already starts with BOS, and the tokenizer adds its own. In training every text starts with two, when it is
served with one: every position is off by one.

## The cure
`tokenizer(text, add_special_tokens=False)` on what the template made.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

HARM = "nats by which the loss grows when the text is served with one begin token"
HARMLESS = 0.1
V, BOS = 48, 1


def tiny() -> GPT2LMHeadModel:
    """A two-layer decoder with learned positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, pad_token_id=0, bos_token_id=BOS, eos_token_id=2, **sizes))


def make_batch(seed: int, num_begin: int) -> dict[str, torch.Tensor]:
    """Begin tokens, then a text in which the token at place p is 3 + 2p or one more."""
    coin = torch.randint(0, 2, (8, 12), generator=torch.Generator().manual_seed(seed))
    text = 3 + 2 * torch.arange(12)[None] + coin
    ids = torch.cat([torch.full((8, num_begin), BOS), text], dim=1)
    return {"input_ids": ids, "labels": ids.clone()}


def broken() -> dict[str, Any]:
    """Template and tokenizer."""
    return {"model": tiny(), "batch": make_batch(0, 2)}


def cured() -> dict[str, Any]:
    """One of them."""
    return {"model": tiny(), "batch": make_batch(0, 1)}


def harm(setup: dict[str, Any]) -> float:
    """Train as given, then look at the loss as trained and as served."""
    model = setup["model"]
    num_begin = int((setup["batch"]["input_ids"][0] == BOS).sum())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(80):
        optimizer.zero_grad()
        model(**make_batch(step, num_begin)).loss.backward()
        optimizer.step()
    losses = []
    with torch.no_grad():
        for n in (num_begin, 1):
            batch = make_batch(10_000, n)
            batch["labels"][:, :n] = -100
            losses.append(model(**batch).loss)
    return float(losses[1] - losses[0])
