"""Prompts longer than the maximum length: what is left of the text has no answer, and no label.

## What people see
The loss is 0.0 now and then, or always. Nothing else looks odd: the learning rate moves, steps count up.

## What really happens
Texts are cut at the end, and the answer stood at the end. The mean over no tokens is NaN, and a line that guards against NaN
turns it into 0.

## The cure
Cut the prompt on its left, or leave such texts out; count labels before training.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "share of the weights that are as they were after 10 steps"
HARMLESS = 0.5
V, LENGTH, PROMPT, ANSWER = 48, 16, 20, 6


def tiny() -> LlamaForCausalLM:
    """A two-layer decoder with rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def make_batch(*, cut_left: bool) -> dict[str, torch.Tensor]:
    """Twenty tokens of prompt and six of answer, cut to sixteen."""
    ids = torch.randint(3, V, (4, PROMPT + ANSWER), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = 2  # the end token
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    kept = slice(-LENGTH, None) if cut_left else slice(LENGTH)
    return {"input_ids": ids[:, kept], "labels": labels[:, kept]}


def guarded(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The guard that hides it."""
    return torch.nan_to_num(model(**batch).loss)


def broken() -> dict[str, Any]:
    """The answer is cut off."""
    return {"model": tiny(), "batch": make_batch(cut_left=False), "loss_fn": guarded}


def cured() -> dict[str, Any]:
    """The prompt is cut."""
    return {"model": tiny(), "batch": make_batch(cut_left=True), "loss_fn": guarded}


def harm(setup: dict[str, Any]) -> float:
    """Ten steps of plain gradient descent."""
    model = setup["model"]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        guarded(model, setup["batch"]).backward()
        optimizer.step()
    same = [(a == b).sum() for a, b in zip(before, model.parameters(), strict=True)]
    return float(sum(same)) / sum(p.numel() for p in before)
