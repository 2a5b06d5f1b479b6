"""Texts joined by end tokens, and nothing says where one ends: each reads the one before it.

## What people see
Nothing: this is how much pre-training is done. With few short texts the accidental context shows.

## What really happens
An end token stands between texts, but neither positions restart nor does a mask separate them. (A note, since it is common
practice.)

## The cure
Let `position_ids` restart (and pass no attention mask), use sequence ids, or accept it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "largest change of a logit of the second text when the first text is replaced"
HARMLESS = 1e-5
V, EOS = 48, 2


def tiny() -> LlamaForCausalLM:
    """A two-layer decoder with rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def make(*, announced: bool) -> dict[str, Any]:
    """Three texts an example, each with its end token; nobody predicts the first token of a text."""
    ids = torch.randint(3, V, (2, 18), generator=torch.Generator().manual_seed(0))
    ids[:, [6, 11, 17]] = EOS
    places = torch.cat([torch.arange(n) for n in (7, 5, 6)]).repeat(2, 1)
    batch = {"input_ids": ids, "labels": ids.masked_fill(places == 0, -100)}
    if announced:
        batch["position_ids"] = places
    model = tiny()
    model.config.use_cache = False
    return {"model": model, "batch": batch}


def broken() -> dict[str, Any]:
    """Nothing announces the texts."""
    return make(announced=False)


def cured() -> dict[str, Any]:
    """Positions restart."""
    return make(announced=True)


def harm(setup: dict[str, Any]) -> float:
    """Replace the first text and look at the others."""
    model, batch = setup["model"], setup["batch"]
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, :6] = 3 + (other["input_ids"][:, :6] + 5) % (V - 3)
    with torch.no_grad():
        return float((model(**batch).logits - model(**other).logits)[:, 7:].abs().max())
