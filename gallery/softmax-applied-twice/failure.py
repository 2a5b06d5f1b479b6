"""Softmax before a loss that applies softmax: the loss cannot fall, and nothing says why.

## What people see
The loss starts at ln V, falls a little and stays near its start, whatever the learning rate.

## What really happens
`cross_entropy` takes logits. It got probabilities, which lie between 0 and 1: their softmax is almost flat, and its gradient
is faint. No model can bring this loss below ln(1 + (V - 1) / e).

## The cure
Hand the logits to the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "nats that the run ends with, on texts that a model can learn by heart"
HARMLESS = 0.5
V = 48


def tiny() -> LlamaForCausalLM:
    """A two-layer decoder with rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts that count upwards: the next token is the last one plus one, which a model learns in seconds."""
    start = torch.randint(3, V, (8, 1), generator=torch.Generator().manual_seed(seed))
    ids = 3 + (start - 3 + torch.arange(12)) % (V - 3)
    return {"input_ids": ids, "labels": ids.clone()}


def right(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def wrong(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Probabilities."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return functional.cross_entropy(logits.softmax(-1).flatten(0, 1), batch["labels"][:, 1:].flatten())


def broken() -> dict[str, Any]:
    """Probabilities."""
    return {"model": tiny(), "batch": make_batch(), "loss_fn": wrong}


def cured() -> dict[str, Any]:
    """Logits."""
    return {"model": tiny(), "batch": make_batch(), "loss_fn": right}


def harm(setup: dict[str, Any]) -> float:
    """Train, then read the loss as the run logs it."""
    model, loss_fn = setup["model"], setup["loss_fn"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        optimizer.zero_grad()
        loss_fn(model, make_batch(step)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_fn(model, make_batch(10_000)))
