"""Labels shifted by the data code and again by the model: each position learns the token after the next.

## What people see
The loss falls, slowly and not as far as it should. What is generated skips every other token.

## What really happens
The collator returns `labels = input_ids[1:]`, and `model(labels=...)` shifts once more.

## The cure
Give the model `labels = input_ids`: classes with a `loss` shift by themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "share of next tokens that are predicted wrongly after 40 steps"
HARMLESS = 0.1
V = 48


def tiny() -> LlamaForCausalLM:
    """A two-layer decoder with rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def make_batch(seed: int, *, shifted: bool) -> dict[str, torch.Tensor]:
    """Texts that count upwards: the next token is the last one plus one, which a model learns in seconds."""
    start = torch.randint(3, V, (8, 1), generator=torch.Generator().manual_seed(seed))
    ids = 3 + (start - 3 + torch.arange(12)) % (V - 3)
    labels = ids.clone()
    if shifted:
        labels = torch.cat([ids[:, 1:], torch.full((8, 1), -100)], dim=1)
    return {"input_ids": ids, "labels": labels}


def broken() -> dict[str, Any]:
    """Shifted here, and in the model."""
    return {"model": tiny(), "batch": make_batch(0, shifted=True)}


def cured() -> dict[str, Any]:
    """Shifted in the model."""
    return {"model": tiny(), "batch": make_batch(0, shifted=False)}


def harm(setup: dict[str, Any]) -> float:
    """Train, then predict the next token of new texts."""
    model = setup["model"]
    shifted = bool((setup["batch"]["labels"] == -100).any())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        optimizer.zero_grad()
        model(**make_batch(step, shifted=shifted)).loss.backward()
        optimizer.step()
    ids = make_batch(10_000, shifted=False)["input_ids"]
    with torch.no_grad():
        predicted = model(input_ids=ids).logits[:, :-1].argmax(dim=-1)
    return float((predicted != ids[:, 1:]).float().mean())
