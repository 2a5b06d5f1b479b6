"""Rows were added to make the table a multiple of 64, and take most of the probability.

## What people see
The loss jumps after the table was padded. Sampling returns ids that the tokenizer does not know.

## What really happens
The new rows of the head were drawn with spread 1, the trained ones are much smaller. No token stands for them, and they take
part in every softmax.

## The cure
Cut the padded columns off before the loss, or train with the rows from the start.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "nats of loss that the rows without a token cost"
HARMLESS = 0.05
V, ROWS = 48, 64


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


def broken() -> dict[str, Any]:
    """The padded rows were drawn anew after training."""
    model = trained(ROWS)
    with torch.no_grad():
        model.lm_head.weight[V:] = torch.randn(ROWS - V, 32)
    return {"model": model, "batch": make_batch(1), "tokenizer": words(V)}


def cured() -> dict[str, Any]:
    """The padded rows took part in training, which pushed them down."""
    return {"model": trained(ROWS), "batch": make_batch(1), "tokenizer": words(V)}


def harm(setup: dict[str, Any]) -> float:
    """The loss over all classes against the one over real classes."""
    with torch.no_grad():
        logits = setup["model"](input_ids=setup["batch"]["input_ids"]).logits[:, :-1]
    targets = setup["batch"]["labels"][:, 1:].flatten()
    over_all, over_real = (torch.nn.functional.cross_entropy(part.flatten(0, 1), targets) for part in (logits, logits[..., :V]))
    return float(over_all - over_real)
