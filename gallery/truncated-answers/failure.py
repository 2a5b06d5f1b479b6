"""Answers are cut at the maximum length, so their ends are never trained.

## What people see
The model stops in mid-sentence at the maximum length, or does not stop at all.

## What really happens
The maximum length was chosen by the median text. More than half of the answers are longer: their last trained token is an
ordinary word, and the end token is cut off.

## The cure
Raise the maximum length, or leave out the texts that do not fit.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "probability of going on where the answer ends, after 60 steps"
HARMLESS = 0.2
V, EOS, PROMPT = 48, 2, 3


def tiny() -> LlamaForCausalLM:
    """A two-layer decoder with rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=EOS, **sizes))


def make_batch(seed: int, length: int) -> dict[str, torch.Tensor]:
    """Three tokens of prompt, then an answer that counts from 10 to 20 and ends; cut to `length`."""
    prompt = torch.randint(30, V, (8, PROMPT), generator=torch.Generator().manual_seed(seed))
    answer = torch.cat([torch.arange(10, 21), torch.tensor([EOS])]).expand(8, -1)
    ids = torch.cat([prompt, answer], dim=1)[:, :length]
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    return {"input_ids": ids, "labels": labels}


def broken() -> dict[str, Any]:
    """Cut after ten tokens."""
    return {"model": tiny(), "batch": make_batch(0, 10)}


def cured() -> dict[str, Any]:
    """Whole."""
    return {"model": tiny(), "batch": make_batch(0, 15)}


def harm(setup: dict[str, Any]) -> float:
    """Train, then ask what follows token 20."""
    model, length = setup["model"], setup["batch"]["input_ids"].shape[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        optimizer.zero_grad()
        model(**make_batch(step, length)).loss.backward()
        optimizer.step()
    with torch.no_grad():
        after_20 = model(input_ids=make_batch(10_000, 14)["input_ids"]).logits[:, -1]
    return float(1 - after_20.softmax(dim=-1)[:, EOS].mean())
