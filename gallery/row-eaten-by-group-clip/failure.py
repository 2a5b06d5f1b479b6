"""Clipping the embedding apart saves the trunk, and the largest row eats the gradient of all other rows.

## What people see
After a clip by groups the steps count again; but some rows never heal, and embeddings learn nothing from such a batch.

## What really happens
Two near-zero rows stand in one batch, with gradients of about 1e25 and 1e10. The table's gradients are clipped to 1 together: the
first row takes the whole budget, the second is left with 1e-15, and every healthy row with 1e-26.

## The cure
`ghoststep.clip_grad_norm_` in its default mode "row": each spiking row is capped by itself, then everything is clipped once.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import ghoststep

CHECK = "amplified-rows"
OPTIONS = {"select": ("GS3", "GS4", "GS6")}  # a recurrence without fast kernels: seconds instead of a minute
HARM = "orders of magnitude that healthy table rows lose of their gradient"
HARMLESS = 3.0
V = 160
NORMS = {17: 1e-26, 18: 1e-11}


def tiny() -> Mamba2ForCausalLM:
    """A recurrent model of eight layers, 73 thousand parameters."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 8, "state_size": 16, "num_heads": 4, "head_dim": 16}
    more: dict[str, Any] = {"n_groups": 1, "chunk_size": 16, "tie_word_embeddings": False, "use_cache": False}
    return Mamba2ForCausalLM(Mamba2Config(vocab_size=V, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes, **more))


def make_batch() -> dict[str, torch.Tensor]:
    """Random tokens, and both near-zero ones in the middle of their examples."""
    ids = torch.randint(20, V, (2, 16), generator=torch.Generator().manual_seed(0))
    ids[0, 8], ids[1, 8] = NORMS
    return {"input_ids": ids, "labels": ids.clone()}


def make(mode: str) -> dict[str, Any]:
    """The setup with the clip in this mode."""
    model = tiny()
    with torch.no_grad():
        for token, norm in NORMS.items():
            row = model.get_input_embeddings().weight[token]
            row *= norm / row.norm()

    def train_step(model: Any, optimizer: Any, batch: Any) -> float:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        ghoststep.clip_grad_norm_(model, 1.0, mode=mode)
        optimizer.step()
        return float(loss.detach())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return {"model": model, "batch": make_batch(), "optimizer": optimizer, "train_step": train_step, "max_grad_norm": 1.0}


def broken() -> dict[str, Any]:
    """Table and trunk apart."""
    return make("group")


def cured() -> dict[str, Any]:
    """Rows first."""
    return make("row")


def healthy_rows(model: Any) -> torch.Tensor:
    """Norms of the gradients of the batch's other rows."""
    norms = model.get_input_embeddings().weight.grad.double().norm(dim=1)
    norms[list(NORMS)] = 0
    return norms[norms > 0]


def harm(setup: dict[str, Any]) -> float:
    """One step: the healthy rows' gradients before the clip and after it."""
    model, batch = setup["model"], setup["batch"]
    model(**batch).loss.backward()
    before = healthy_rows(model).median()
    setup["train_step"](model, setup["optimizer"], batch)
    return float((before / healthy_rows(model).median()).log10())
