"""Label smoothing over classes that are masked out: the loss is ruled by a constant.

## What people see
The loss starts at hundreds and hardly moves, or is infinite. The model learns all the same, which hides it.

## What really happens
The padded columns are set to -1e4 so that they have no probability, and `label_smoothing=0.1` gives them a share of the
target.

## The cure
Cut the columns off before the loss (`logits[..., :num_tokens]`) instead of filling them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "nats of loss that belong to classes without probability"
HARMLESS = 0.05
V, TOKENS = 64, 48


def tiny() -> LlamaForCausalLM:
    """A two-layer decoder with rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def make_batch() -> dict[str, torch.Tensor]:
    """Random tokens."""
    ids = torch.randint(3, TOKENS, (4, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def smoothed(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Next-token loss with smoothing."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1)


def filled(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Padded columns are filled."""
    logits = model(input_ids=batch["input_ids"]).logits
    return smoothed(logits.masked_fill(torch.arange(V) >= TOKENS, -1e4), batch)


def cut(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Padded columns are cut off."""
    return smoothed(model(input_ids=batch["input_ids"]).logits[..., :TOKENS], batch)


def broken() -> dict[str, Any]:
    """Filled, then smoothed."""
    return {"model": tiny(), "batch": make_batch(), "loss_fn": filled}


def cured() -> dict[str, Any]:
    """Cut, then smoothed."""
    return {"model": tiny(), "batch": make_batch(), "loss_fn": cut}


def harm(setup: dict[str, Any]) -> float:
    """The loss as given against the one over real classes."""
    with torch.no_grad():
        return float(setup["loss_fn"](setup["model"], setup["batch"]) - cut(setup["model"], setup["batch"]))
