"""Generation stops at another token than the one that ends the training texts.

## What people see
Answers are right and never end.

## What really happens
Training ends texts with the tokenizer's `</s>`, id 2. The generation config, from another model, waits for id 3.

## The cure
`model.generation_config.eos_token_id = tokenizer.eos_token_id`, and save.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "tokens generated behind the end token"
HARMLESS = 0


def tiny(rows: int) -> LlamaForCausalLM:
    """A decoder with this many table rows."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def words(num: int) -> Tokenizer:
    """A tokenizer of whole words: <pad>, <s>, </s>, w3, w4, ..."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, num)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return tokenizer


def saved(model: LlamaForCausalLM, tokenizer: Tokenizer) -> Path:
    """A checkpoint folder, removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="ghoststep-gallery-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make(stop: int) -> str:
    """A model that always answers with the end token; generation stops at `stop`."""
    model = tiny(64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight[:, 0] = 1.0
        model.lm_head.weight[2, 0] = 10.0
    model.generation_config.eos_token_id = stop
    return str(saved(model, words(64)))


def broken() -> str:
    """An ordinary word."""
    return make(3)


def cured() -> str:
    """The end token."""
    return make(2)


def harm(setup: str) -> float:
    """Greedy, at most 20 tokens."""
    made = LlamaForCausalLM.from_pretrained(setup).generate(torch.tensor([[1, 5, 6]]), max_new_tokens=20, do_sample=False)
    answer = made[0, 3:].tolist()
    return float(len(answer) - answer.index(2) - 1)
