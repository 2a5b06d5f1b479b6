"""User and assistant markers have the same, never trained row, and LoRA leaves the table as it is.

## What people see
Fine-tuning with LoRA learns the answers and not the format: the model speaks for the user.

## What really happens
The base model reserved the markers and never trained them: their rows are bit-identical. A frozen table keeps them so; the
model cannot know who speaks.

## The cure
Initialise the rows apart and train them (PEFT: `trainable_token_indices` or `modules_to_save`).
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

HARM = "1 if swapping the two markers changes no logit"
HARMLESS = 0
OPTIONS = {"training": "lora"}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}</s>{% endfor %}"


def tiny(rows: int) -> LlamaForCausalLM:
    """A decoder with this many table rows."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def words() -> Tokenizer:
    """Whole words and two role markers."""
    markers = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate([*markers, *(f"w{i}" for i in range(5, 64))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(markers)
    return tokenizer


def saved(model: LlamaForCausalLM, tokenizer: Tokenizer) -> Path:
    """A checkpoint folder, removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="ghoststep-gallery-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make(*, same: bool) -> str:
    """`same`: both markers have one row's values."""
    model = tiny(64)
    if same:
        with torch.no_grad():
            model.get_input_embeddings().weight[4] = model.get_input_embeddings().weight[3]
    return str(saved(model, words()))


def broken() -> str:
    """Identical rows."""
    return make(same=True)


def cured() -> str:
    """Rows of their own."""
    return make(same=False)


def harm(setup: str) -> float:
    """The same conversation with the roles swapped."""
    model = LlamaForCausalLM.from_pretrained(setup)
    with torch.no_grad():
        one, other = (model(input_ids=torch.tensor([ids])).logits for ids in ([3, 9, 2, 4, 8, 2], [4, 9, 2, 3, 8, 2]))
    return float(torch.equal(one, other))
