"""A plain Transformer loses the step, because the near-zero token stands first.

## What people see
Some batches teach nothing. The same token in the middle of a text does no harm, so the model looks immune.

## What really happens
Attention saves a near-zero row wherever it reaches an ordinary token. At position 0 there is none: eighteen layers divide by almost
nothing, the gradient of that row is 1e20, the float32 norm is inf, and clipping sets every gradient to 0.

## The cure
Repair the row before training (a tenth of the median norm, never zeros), or always put a healthy token in front.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CHECK = "amplified-rows"
HARM = "share of the parameters whose gradient the step sets to exactly zero"
HARMLESS = 0.0
V = 160
TOKEN = 17


def tiny() -> LlamaForCausalLM:
    """A decoder of eighteen narrow layers, 196 thousand parameters."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 18, "num_attention_heads": 4}
    more: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, **sizes, **more))


def make_batch() -> dict[str, torch.Tensor]:
    """Random tokens; the first example begins with TOKEN."""
    ids = torch.randint(20, V, (2, 16), generator=torch.Generator().manual_seed(0))
    ids[0, 0] = TOKEN
    return {"input_ids": ids, "labels": ids.clone()}


def make(*, decayed: bool) -> dict[str, Any]:
    """`decayed`: TOKEN's row has a norm of 1e-30; otherwise it is as initialised."""
    model = tiny()
    with torch.no_grad():
        row = model.get_input_embeddings().weight[TOKEN]
        row *= 1e-30 / row.norm() if decayed else 0.1

    def train_step(model: Any, optimizer: Any, batch: Any) -> float:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return {"model": model, "batch": make_batch(), "optimizer": optimizer, "train_step": train_step, "max_grad_norm": 1.0}


def broken() -> dict[str, Any]:
    """Norm 1e-30."""
    return make(decayed=True)


def cured() -> dict[str, Any]:
    """A tenth of an ordinary row, as `ghoststep fix` would set it."""
    return make(decayed=False)


def harm(setup: dict[str, Any]) -> float:
    """One step: which share of the parameters' gradients is exactly zero?"""
    model = setup["model"]
    setup["train_step"](model, setup["optimizer"], setup["batch"])
    zero = [not p.grad.any() for p in model.parameters() if p.grad is not None]
    return sum(zero) / len(zero)
