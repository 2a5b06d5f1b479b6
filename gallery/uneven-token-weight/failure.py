"""A mean of means: a token of a short answer weighs many times one of a long answer.

## What people see
Accumulating eight small batches trains another model than one large batch. Short answers get better, long ones worse.

## What really happens
The loss is averaged over the tokens of each text, then over texts. A text of 3 tokens and one of 24 count the same.

## The cure
Sum over tokens and divide by their number in the whole batch (or accumulation window).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "1 - cosine between the gradient and that of the mean over tokens"
HARMLESS = 1e-4
V = 48


def tiny() -> LlamaForCausalLM:
    """A two-layer decoder with rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def make_batch() -> dict[str, torch.Tensor]:
    """Texts of 24, 4, 12 and 3 tokens."""
    ids = torch.randint(3, V, (4, 24), generator=torch.Generator().manual_seed(0))
    attended = (torch.arange(24)[None] < torch.tensor([24, 4, 12, 3])[:, None]).long()
    return {"input_ids": ids * attended, "attention_mask": attended, "labels": ids.masked_fill(attended == 0, -100)}


def by_token(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Loss of each position [batch, time - 1]; 0 where it is ignored."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], ignore_index=-100, reduction="none")


def mean_of_means(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Over the tokens of a text, then over texts."""
    counted = batch["labels"][:, 1:] != -100
    return (by_token(model, batch).sum(dim=1) / counted.sum(dim=1)).mean()


def mean_over_tokens(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Over all tokens at once."""
    return by_token(model, batch).sum() / (batch["labels"][:, 1:] != -100).sum()


def broken() -> dict[str, Any]:
    """The mean of means."""
    return {"model": tiny(), "batch": make_batch(), "loss_fn": mean_of_means, "pad_token_id": 0}


def cured() -> dict[str, Any]:
    """One mean."""
    return {"model": tiny(), "batch": make_batch(), "loss_fn": mean_over_tokens, "pad_token_id": 0}


def harm(setup: dict[str, Any]) -> float:
    """Compare the gradient with that of the mean over tokens."""
    gradients = []
    for loss_fn in (setup["loss_fn"], mean_over_tokens):
        model = tiny()
        loss_fn(model, setup["batch"]).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return float(1 - torch.cosine_similarity(*gradients, dim=0))
