"""Clipping to infinity, only to log the norm, turns every weight into NaN.

## What people see
The loss is logged as 0.0 from some step on (trainers filter NaN), or as NaN; the checkpoint is dead.

## What really happens
With `max_grad_norm=0` some trainers call `clip_grad_norm_(parameters, inf)` to get the norm. One near-zero row makes that norm inf,
and inf / inf is NaN: every gradient is multiplied by it, and the optimizer writes it into every weight.

## The cure
`ghoststep.clip_grad_norm_(model, math.inf)` only measures. Better: a finite bound, and repaired rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import ghoststep

CHECK = "amplified-rows"
OPTIONS = {"select": ("GS3", "GS4", "GS6")}  # a recurrence without fast kernels: seconds instead of a minute
HARM = "share of the weights that are NaN after one step"
HARMLESS = 0.0
V = 160
TOKEN = 17


def tiny() -> Mamba2ForCausalLM:
    """A recurrent model of eight layers, 73 thousand parameters."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 8, "state_size": 16, "num_heads": 4, "head_dim": 16}
    more: dict[str, Any] = {"n_groups": 1, "chunk_size": 16, "tie_word_embeddings": False, "use_cache": False}
    return Mamba2ForCausalLM(Mamba2Config(vocab_size=V, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes, **more))


def make_batch() -> dict[str, torch.Tensor]:
    """Random tokens, and TOKEN once in the middle."""
    ids = torch.randint(20, V, (2, 16), generator=torch.Generator().manual_seed(0))
    ids[0, 8] = TOKEN
    return {"input_ids": ids, "labels": ids.clone()}


def make(clip: Any) -> dict[str, Any]:
    """The setup with this clip."""
    model = tiny()
    with torch.no_grad():
        row = model.get_input_embeddings().weight[TOKEN]
        row *= 1e-30 / row.norm()

    def train_step(model: Any, optimizer: Any, batch: Any) -> float:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        clip(model)  # for the log
        optimizer.step()
        return float(loss.detach())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return {"model": model, "batch": make_batch(), "optimizer": optimizer, "train_step": train_step}


def broken() -> dict[str, Any]:
    """torch's."""
    return make(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))


def cured() -> dict[str, Any]:
    """Ours: a norm, and untouched gradients."""
    return make(lambda model: ghoststep.clip_grad_norm_(model, math.inf))


def harm(setup: dict[str, Any]) -> float:
    """One step."""
    model = setup["model"]
    setup["train_step"](model, setup["optimizer"], setup["batch"])
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    return float(values.isnan().double().mean())
