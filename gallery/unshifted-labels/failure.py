"""Labels that are not shifted: the model is trained to repeat the token it reads.

## What people see
The loss is down to 0.01 within a few steps. Generation repeats the last token for ever.

## What really happens
Each position is trained on its own token. The model's own loss shifts labels by one; this hand-written one does not, and
nothing else in the code does.

## The cure
`cross_entropy(logits[:, :-1], labels[:, 1:])`, or the model's own `loss`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "nats by which the logged loss is lower than the loss of predicting the next token"
HARMLESS = 0.1
V = 48


def tiny() -> LlamaForCausalLM:
    """A two-layer decoder with rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    """Texts that count upwards: the next token is the last one plus one, which a model learns in seconds."""
    start = torch.randint(3, V, (8, 1), generator=torch.Generator().manual_seed(seed))
    ids = 3 + (start - 3 + torch.arange(12)) % (V - 3)
    return {"input_ids": ids, "labels": ids.clone()}


def unshifted(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Position by position."""
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def shifted(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each position against the next token."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def broken() -> dict[str, Any]:
    """No shift."""
    return {"model": tiny(), "batch": make_batch(0), "loss_fn": unshifted}


def cured() -> dict[str, Any]:
    """One shift."""
    return {"model": tiny(), "batch": make_batch(0), "loss_fn": shifted}


def harm(setup: dict[str, Any]) -> float:
    """Train, then compare what is logged with the next-token loss."""
    model, loss_fn = setup["model"], setup["loss_fn"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        optimizer.zero_grad()
        loss_fn(model, make_batch(step)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(shifted(model, make_batch(10_000)) - loss_fn(model, make_batch(10_000)))
