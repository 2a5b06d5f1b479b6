"""The config says that input and output embeddings are one table, and the file holds two.

## What people see
The loss after loading is far above the one before saving. No key is reported missing.

## What really happens
The head was trained as a table of its own while `tie_word_embeddings` was true. A loader that trusts the flag keeps one table
and throws the trained head away.

## The cure
Set `tie_word_embeddings` to false, or tie, train and save again.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

HARM = "nats by which the loss is higher when the flag is believed"
HARMLESS = 1e-4


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
    return folder


def trained() -> LlamaForCausalLM:
    """Two tables, trained to count upwards."""
    model = tiny(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        ids = torch.randint(3, 52, (8, 1)) + torch.arange(12)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model


def make(*, flag: bool) -> str:
    """The same tensors with either flag."""
    folder = saved(trained(), words(64))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": flag}))
    return str(folder)


def broken() -> str:
    """One table, says the flag."""
    return make(flag=True)


def cured() -> str:
    """Two tables, says the flag."""
    return make(flag=False)


def harm(setup: str) -> float:
    """A loader that believes the flag, against one that takes what is there."""
    stored = load_file(f"{setup}/model.safetensors")
    config = LlamaConfig.from_pretrained(setup)
    ids = torch.arange(10, 22)[None]
    losses = []
    for tied in (False, bool(config.tie_word_embeddings)):
        config.tie_word_embeddings = tied
        model = LlamaForCausalLM(config)
        model.load_state_dict(stored)
        if tied:
            model.lm_head.weight = model.get_input_embeddings().weight
        if tied:
            model.load_state_dict({k: v for k, v in stored.items() if k != "lm_head.weight"}, strict=False)
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=ids).loss)
    return float(losses[1] - losses[0])
