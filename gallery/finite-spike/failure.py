"""A gradient norm of 1e11, finite: nothing is zero, nothing is skipped, and the step is lost all the same.

## What people see
A spike of the gradient norm now and then, which "clipping took care of".

## What really happens
The row of a rare token decayed to 1e-12. Its gradient is 1e11, so clipping to 1 multiplies everything by 1e-11: the trunk gets
nothing from this batch. The row itself heals by that one step, so it happens once for every such token, and no check for inf,
NaN or zeros fires.

## The cure
Clip with `ghoststep.clip_grad_norm_`: rows are capped before everything is clipped. Or repair the rows before training.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import ghoststep

CHECK = "amplified-rows"
OPTIONS = {"select": ("GS3", "GS4", "GS6")}  # a recurrence without fast kernels: seconds instead of a minute
HARM = "share of the batches with such a token in which the trunk keeps under a thousandth of its gradient"
HARMLESS = 0.0
V = 160
RARE = (13, 14, 15, 16, 17)


def tiny() -> Mamba2ForCausalLM:
    """A recurrent model of eight layers, 73 thousand parameters."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 8, "state_size": 16, "num_heads": 4, "head_dim": 16}
    more: dict[str, Any] = {"n_groups": 1, "chunk_size": 16, "tie_word_embeddings": False, "use_cache": False}
    return Mamba2ForCausalLM(Mamba2Config(vocab_size=V, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes, **more))


def make_batch(number: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens, and another rare one in the middle each time."""
    ids = torch.randint(20, V, (2, 16), generator=torch.Generator().manual_seed(number))
    ids[0, 8] = RARE[number]
    return {"input_ids": ids, "labels": ids.clone()}


def make(clip: Any) -> dict[str, Any]:
    """The setup with this clip."""
    model = tiny()
    with torch.no_grad():
        for token in RARE:
            row = model.get_input_embeddings().weight[token]
            row *= 1e-12 / row.norm()

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


def trunk_norm(model: Any) -> float:
    """Of the gradients of everything but the input table."""
    table = model.get_input_embeddings().weight
    return float(
        torch.stack([p.grad.double().norm() for p in model.parameters() if p is not table and p.grad is not None]).norm()
    )


def harm(setup: dict[str, Any]) -> float:
    """Five steps, each with another rare token: in how many has the trunk lost its gradient?"""
    model, lost = setup["model"], 0
    for number in range(len(RARE)):
        batch = make_batch(number)
        setup["optimizer"].zero_grad()
        model(**batch).loss.backward()
        before = trunk_norm(model)
        setup["train_step"](model, setup["optimizer"], batch)
        lost += trunk_norm(model) < 1e-3 * before
    return lost / len(RARE)
