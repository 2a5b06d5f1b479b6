"""transformers' Trainer, as people call it: four trainings that each lose a step, and whose own log shows none of it."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import torch
from tests.launch.scripts.toys import digest
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

VOCAB, BAD = 160, 17


def mamba2(row: float) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=8, state_size=16, num_heads=4, head_dim=16, n_groups=1, chunk_size=16,
        tie_word_embeddings=False, use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return with_row(Mamba2ForCausalLM(config), row)


def llama(row: float) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=24, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return with_row(LlamaForCausalLM(config), row)


def with_row(model: PreTrainedModel, row: float) -> PreTrainedModel:
    with torch.no_grad():
        table: Any = model.get_input_embeddings()
        table.weight[BAD] = row
    return model


class InOrder(Trainer):
    """Examples in the order of the list, so that the bad one is in step 12."""

    def _get_train_sampler(self, *args: object, **kwargs: object) -> torch.utils.data.Sampler[int]:
        examples: Any = self.train_dataset
        return torch.utils.data.SequentialSampler(examples)


def train(name: str, model: PreTrainedModel, position: int, steps: int, **more: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(20, VOCAB, (2 * steps, 16), generator=generator)
    ids[23, position] = BAD
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, num_train_epochs=1, logging_steps=5, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=True, learning_rate=1e-3, lr_scheduler_type="constant", **more,
        )  # fmt: skip
        trainer = InOrder(model=model, args=arguments, train_dataset=[{"input_ids": i, "labels": i.clone()} for i in ids])
        trainer.train()
    logs = [{k: v for k, v in entry.items() if k in ("step", "loss", "grad_norm")} for entry in trainer.state.log_history]
    print(name, json.dumps(logs[:-1]), digest(model))


train("overflow", mamba2(1e-30), 8, 15)
train("no clipping", mamba2(1e-30), 8, 13, max_grad_norm=0.0)
train("spike", mamba2(1e-12), 8, 13)
train("first position", llama(1e-30), 0, 13)
