"""A transpose before a reshape: each label is compared with classes of many positions.

## What people see
Shapes fit, the loss falls to some level and stays. Generation is noise.

## What really happens
`cross_entropy` wants classes second, so the logits were transposed to [B, V, T] and then flattened to [-1, V]: each row of V
numbers now holds a few classes at many positions.

## The cure
`logits.flatten(0, 1)` on [B, T, V], or [B, V, T] as it is with labels [B, T].
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "nats by which the next-token loss stays above that of a right loss"
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
    """Flattened as they are."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def wrong(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Transposed, then flattened."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return functional.cross_entropy(logits.transpose(1, 2).reshape(-1, V), batch["labels"][:, 1:].flatten())


def broken() -> dict[str, Any]:
    """Transposed, then flattened."""
    return {"model": tiny(), "batch": make_batch(), "loss_fn": wrong}


def cured() -> dict[str, Any]:
    """Flattened as they are."""
    return {"model": tiny(), "batch": make_batch(), "loss_fn": right}


def harm(setup: dict[str, Any]) -> float:
    """Train, then measure the right loss."""
    model, loss_fn = setup["model"], setup["loss_fn"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        optimizer.zero_grad()
        loss_fn(model, make_batch(step)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(right(model, make_batch(10_000)))
