"""The prompt is trained on beside the answer, and is most of the tokens.

## What people see
The loss falls. The model gets better at writing questions; answers change little.

## What really happens
The labels are the whole conversation. With ten tokens of question and three of answer, most of the gradient is about
questions.

## The cure
Set labels to -100 where the role is not that of the answer.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "1 - cosine between the gradient and that of the answers"
HARMLESS = 1e-3
V, PROMPT = 48, 10


def tiny() -> LlamaForCausalLM:
    """A two-layer decoder with rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def make(*, answers_only: bool) -> dict[str, Any]:
    """Ten tokens of prompt, three of answer."""
    ids = torch.randint(3, V, (4, 13), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = 2  # the end token
    roles = (torch.arange(13)[None] >= PROMPT).long().expand(4, -1)
    labels = ids.masked_fill(roles == 0, -100) if answers_only else ids.clone()
    return {"model": tiny(), "batch": {"input_ids": ids, "labels": labels}, "token_roles": roles}


def broken() -> dict[str, Any]:
    """Everything is a target."""
    return make(answers_only=False)


def cured() -> dict[str, Any]:
    """The answers are."""
    return make(answers_only=True)


def harm(setup: dict[str, Any]) -> float:
    """Compare the gradient with the one that was meant."""
    gradients = []
    for batch in (setup["batch"], cured()["batch"]):
        model = tiny()
        model(**batch).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return float(1 - torch.cosine_similarity(*gradients, dim=0))
