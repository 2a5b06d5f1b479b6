"""PAD and the end token share an id, and labels are masked by that id: the end is never a target.

## What people see
The loss is fine. The model answers, and then goes on talking to the length limit.

## What really happens
`labels[input_ids == pad_id] = -100` with `pad_token = eos_token` also removes the one end token of each text that should be
trained.

## The cure
Mask by position: `labels[attention_mask == 0] = -100`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "probability of going on where the text ends, after 60 steps"
HARMLESS = 0.2
V, EOS = 48, 2


def tiny() -> LlamaForCausalLM:
    """A two-layer decoder with rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=EOS, bos_token_id=1, eos_token_id=EOS, **sizes))


def make_batch(seed: int, *, by_id: bool) -> dict[str, torch.Tensor]:
    """Texts that count up and stop after token 20, padded with the end token."""
    start = torch.randint(8, 18, (8, 1), generator=torch.Generator().manual_seed(seed))
    ids = start + torch.arange(14)
    attended = (ids <= 21).long()
    ids = ids.masked_fill(ids > 20, EOS)
    ignored = (ids == EOS) if by_id else (attended == 0)
    return {"input_ids": ids, "attention_mask": attended, "labels": ids.masked_fill(ignored, -100)}


def broken() -> dict[str, Any]:
    """Masked by id."""
    return {"model": tiny(), "batch": make_batch(0, by_id=True)}


def cured() -> dict[str, Any]:
    """Masked by position."""
    return {"model": tiny(), "batch": make_batch(0, by_id=False)}


def harm(setup: dict[str, Any]) -> float:
    """Train, then ask what follows token 20."""
    model, batch = setup["model"], setup["batch"]
    by_id = not bool((batch["labels"] == EOS).any())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        optimizer.zero_grad()
        model(**make_batch(step, by_id=by_id)).loss.backward()
        optimizer.step()
    with torch.no_grad():
        after_20 = model(input_ids=torch.arange(12, 21)[None]).logits[0, -1]
    return float(1 - after_20.softmax(dim=-1)[EOS])
