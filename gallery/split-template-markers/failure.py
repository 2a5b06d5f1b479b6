"""The chat template writes markers that are no tokens: each is cut into a dozen characters.

## What people see
Fine-tuning needs more memory than reckoned, and the model gets the markers wrong now and then.

## What really happens
The template was copied from another model. This tokenizer has no `<|im_start|>`; it spells it out.

## The cure
Add the markers as special tokens and resize the table, or use the template of the base model.
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

HARM = "tokens that a marker takes beyond one"
HARMLESS = 0
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>\\n{% endfor %}"


def tiny(rows: int) -> LlamaForCausalLM:
    """A decoder with this many table rows."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def saved(model: LlamaForCausalLM, tokenizer: Tokenizer) -> Path:
    """A checkpoint folder, removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="ghoststep-gallery-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"pad_token": "<pad>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make(*, added: bool) -> str:
    """A tokenizer of single bytes, with the markers or without."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    if added:
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return str(saved(tiny(320), tokenizer))


def broken() -> str:
    """Spelt out."""
    return make(added=False)


def cured() -> str:
    """One token each."""
    return make(added=True)


def harm(setup: str) -> float:
    """Encode the marker."""
    return float(len(Tokenizer.from_file(f"{setup}/tokenizer.json").encode("<|im_start|>").ids) - 1)
