"""The last token of a packed text is trained to predict the first token of the next, unrelated one.

## What people see
The loss does not go below a floor that grows with the number of texts in a pack.

## What really happens
The texts are kept apart by restarting `position_ids`, but the labels run on across the seams, where nothing can be known.

## The cure
`labels[position_ids == 0] = -100`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "nats of loss left after 60 steps on texts that are predictable to the last token"
HARMLESS = 0.15
V = 48


def tiny() -> LlamaForCausalLM:
    """A two-layer decoder with rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def make_batch(seed: int, *, across: bool) -> dict[str, torch.Tensor]:
    """Four counting texts of five tokens in each example, at random starts."""
    start = torch.randint(3, V, (8, 4, 1), generator=torch.Generator().manual_seed(seed))
    ids = (3 + (start - 3 + torch.arange(5)) % (V - 3)).flatten(1)
    places = torch.arange(5).repeat(8, 4)
    labels = ids.clone() if across else ids.masked_fill(places == 0, -100)
    return {"input_ids": ids, "position_ids": places, "labels": labels}


def make(*, across: bool) -> dict[str, Any]:
    """The setup; without a cache, restarting positions keep texts apart."""
    model = tiny()
    model.config.use_cache = False
    return {"model": model, "batch": make_batch(0, across=across)}


def broken() -> dict[str, Any]:
    """Labels run on."""
    return make(across=True)


def cured() -> dict[str, Any]:
    """Labels stop at the seams."""
    return make(across=False)


def harm(setup: dict[str, Any]) -> float:
    """Train and look at the loss."""
    model = setup["model"]
    across = not bool((setup["batch"]["labels"] == -100).any())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        optimizer.zero_grad()
        model(**make_batch(step, across=across)).loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(model(**make_batch(10_000, across=across)).loss)
