"""Tokens were added to a trained model, and their new rows outshine all others.

## What people see
The loss jumps by several nats when fine-tuning starts, and the first hundred steps only repair it.

## What really happens
The head's new rows were drawn with `nn.Linear`'s or `nn.Embedding`'s own spread instead of that of the trained rows. Their
logits are large for every text.

## The cure
Initialise new rows with the mean of the trained ones (`mean_resizing=True`).
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "nats by which the loss on old texts rises when the tokens are added"
HARMLESS = 0.2
V, NEW = 60, 4


def words(num: int) -> Tokenizer:
    """A tokenizer of whole words: <pad>, <s>, </s>, w3, w4, ..."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, num)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def trained(rows: int) -> LlamaForCausalLM:
    """Trained to count upwards for 40 steps, over all its rows."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=rows, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        optimizer.zero_grad()
        model(**make_batch(step)).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    """Texts that count upwards."""
    start = torch.randint(3, V, (8, 1), generator=torch.Generator().manual_seed(seed))
    ids = 3 + (start - 3 + torch.arange(12)) % (V - 3)
    return {"input_ids": ids, "labels": ids.clone()}


def make(*, by_mean: bool) -> dict[str, Any]:
    """`by_mean`: new rows are the mean of the trained ones."""
    model, tokenizer = trained(V), words(V)
    tokenizer.add_tokens([f"<new{i}>" for i in range(NEW)])
    mean = model.lm_head.weight[3:].detach().mean(dim=0)
    model.resize_token_embeddings(V + NEW, mean_resizing=True)
    with torch.no_grad():
        model.lm_head.weight[V:] = mean if by_mean else torch.randn(NEW, 32)
    return {"model": model, "batch": make_batch(1), "tokenizer": tokenizer}


def broken() -> dict[str, Any]:
    """Drawn with spread 1."""
    return make(by_mean=False)


def cured() -> dict[str, Any]:
    """The mean."""
    return make(by_mean=True)


def harm(setup: dict[str, Any]) -> float:
    """The loss with the new tokens against the one before."""
    before = trained(V)
    with torch.no_grad():
        return float(setup["model"](**setup["batch"]).loss - before(**setup["batch"]).loss)
