"""Left-padded texts without an attention mask: every real token reads the padding before it.

## What people see
The model is fine on single texts and worse in batches, the more so the more the lengths differ.

## What really happens
The batch was padded on the left and fed without `attention_mask`. The causal mask hides the future, not the past, and padding
on the left is the past of every token.

## The cure
Pass `attention_mask=(input_ids != pad).long()`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "nats by which the loss of a text moves when it is padded"
HARMLESS = 1e-3
V = 48


def tiny() -> LlamaForCausalLM:
    """A two-layer decoder with rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def make_batch(*, masked: bool, text: torch.Tensor | None = None, padding: int = 4) -> dict[str, torch.Tensor]:
    """One full text and one padded on the left; or `text` with so much padding."""
    ids = torch.randint(3, V, (2, 12), generator=torch.Generator().manual_seed(0))
    attended = torch.ones_like(ids)
    if text is not None:
        ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), text], dim=1)
        attended = torch.ones_like(ids)
        attended[:, :padding] = 0
    else:
        attended[1, :padding] = 0
    ids[attended == 0] = 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(attended == 0, -100)}
    return {**batch, "attention_mask": attended} if masked else batch


def make(*, masked: bool) -> dict[str, Any]:
    """The setup."""
    return {"model": tiny(), "batch": make_batch(masked=masked), "pad_token_id": 0}


def broken() -> dict[str, Any]:
    """Without the mask."""
    return make(masked=False)


def cured() -> dict[str, Any]:
    """With the mask."""
    return make(masked=True)


def harm(setup: dict[str, Any]) -> float:
    """The same text, trained on for a few steps, alone and with 20 PAD in front."""
    model, masked = setup["model"], "attention_mask" in setup["batch"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        model(**setup["batch"]).loss.backward()
        optimizer.step()
    text = setup["batch"]["input_ids"][:1]
    with torch.no_grad():
        losses = [model(**make_batch(masked=masked, text=text, padding=n)).loss for n in (1, 20)]
    return float((losses[1] - losses[0]).abs())
