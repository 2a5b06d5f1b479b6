"""One token in the batch, and every gradient of the step is exactly zero.

## What people see
Nothing: the loss is ordinary and falls a little slower. If the gradient norm is logged, it reads inf now and then.

## What really happens
The row of that token decayed to 1e-30. Eight recurrent layers divide by it again and again: its gradient is 1e27, the float32 norm
of all gradients overflows, and `clip_grad_norm_` multiplies every gradient by 1 / inf = 0. The row never moves, so each batch with
the token is lost, for ever.

## The cure
Clip with `ghoststep.clip_grad_norm_`: the row is capped, the rest keeps its gradient, and the row heals at once. Or repair the row.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import ghoststep

CHECK = "amplified-rows"
OPTIONS = {"select": ("GS3", "GS4", "GS6")}  # a recurrence without fast kernels: seconds instead of a minute
HARM = "share of the batches with the token whose step is lost"
HARMLESS = 0.0
V = 160
TOKEN = 17


def tiny() -> Mamba2ForCausalLM:
    """A recurrent model of eight layers, 73 thousand parameters."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 8, "state_size": 16, "num_heads": 4, "head_dim": 16}
    more: dict[str, Any] = {"n_groups": 1, "chunk_size": 16, "tie_word_embeddings": False, "use_cache": False}
    return Mamba2ForCausalLM(Mamba2Config(vocab_size=V, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes, **more))


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens, and TOKEN once in the middle."""
    ids = torch.randint(20, V, (2, 16), generator=torch.Generator().manual_seed(seed))
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
        clip(model)
        optimizer.step()
        return float(loss.detach())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return {"model": model, "batch": make_batch(), "optimizer": optimizer, "train_step": train_step, "max_grad_norm": 1.0}


def broken() -> dict[str, Any]:
    """torch's clip."""
    return make(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def cured() -> dict[str, Any]:
    """The clip that cannot lose a step."""
    return make(lambda model: ghoststep.clip_grad_norm_(model, 1.0))


def harm(setup: dict[str, Any]) -> float:
    """Five steps: after how many of them is every gradient exactly zero?"""
    model, lost = setup["model"], 0
    for seed in range(5):
        setup["train_step"](model, setup["optimizer"], make_batch(seed))
        lost += all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    return lost / 5
