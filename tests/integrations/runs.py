"""Tiny real runs of each trainer, on a poisoned and on a healthy model, with and without the watch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ghoststep.finding import Report
from tests.small_models import mamba2, with_dead_row

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'ghoststep[hf]'")
TOKEN, V, POSITION = 17, 160, 8
Batches = Sequence[dict[str, torch.Tensor]]


def poisoned() -> Any:
    """A Mamba-2 of 8 layers whose table row 17 has decayed to 1e-30."""
    torch.manual_seed(0)
    return with_dead_row(mamba2(8, vocab_size=V), TOKEN)


def healthy() -> Any:
    """A Llama of 2 layers, with dropout: a watch that draws a random number changes its losses."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2,
        attention_dropout=0.1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def batches(count: int, *, guilty: Sequence[int] = ()) -> Batches:
    """`count` micro-batches of 2 examples; the token stands at position 8 of the second example of the guilty ones."""
    ids_NBT = torch.randint(20, V, (count, 2, 16), generator=torch.Generator().manual_seed(1))
    for number in guilty:
        ids_NBT[number, 1, POSITION] = TOKEN
    return [{"input_ids": ids_BT, "labels": ids_BT} for ids_BT in ids_NBT]


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The examples of the micro-batches, in order."""

    def __init__(self, given: Batches) -> None:
        self.given = given

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self.given:
            for ids_T in batch["input_ids"]:
                yield {"input_ids": ids_T, "labels": ids_T}


@dataclass
class Ran:
    """losses of every micro-batch, log: the trainer's own."""

    losses: list[float] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    report: Report | None = None


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)


def keep_losses(model: Any, ran: Ran) -> Any:
    def keep(module: Any, args: Any, output: Any) -> None:
        ran.losses.append(output.loss.item())

    return model.register_forward_hook(keep)


def with_trainer(
    model: Any, given: Batches, tmp_path: Path, *, watched: bool = True, accumulation: int = 1, max_grad_norm: float = 1.0,
    logging_steps: int = 5, scheduler: str = "constant", **options: Any,
) -> Ran:  # fmt: skip
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    from ghoststep.integrations.transformers import GhoststepCallback

    ran, callback = Ran(), GhoststepCallback(**options)
    hook = keep_losses(model, ran)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=len(given) // accumulation, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, max_grad_norm=max_grad_norm, logging_steps=logging_steps, seed=3,
        lr_scheduler_type=scheduler, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Stream(given), optimizers=(optimizer_of(model), None),
        callbacks=[callback] if watched else [],
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        hook.remove()
    ran.log, ran.steps = trainer.state.log_history, trainer.state.global_step
    if watched:
        ran.report = callback.report()
    return ran


def with_lightning(
    model: Any, given: Batches, tmp_path: Path, *, watched: bool = True, accumulation: int = 1, **options: Any
) -> Ran:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
    from ghoststep.integrations.lightning import GhoststepCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ran, callback = Ran(), GhoststepCallback(**options)
    hook = keep_losses(model, ran)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    trainer = lightning.Trainer(
        max_steps=len(given) // accumulation, accelerator="cpu", logger=False, enable_checkpointing=False, gradient_clip_val=1.0,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path), accumulate_grad_batches=accumulation,
        callbacks=[callback] if watched else [],
    )  # fmt: skip
    model.train()
    torch.manual_seed(3)
    try:
        trainer.fit(Module(), torch.utils.data.DataLoader(list(given), batch_size=None))  # type: ignore[arg-type]
    finally:
        hook.remove()
    ran.steps = trainer.global_step
    if watched:
        ran.report = callback.report()
    return ran


def with_accelerate(
    model: Any, given: Batches, tmp_path: Path, *, watched: bool = True, accumulation: int = 1, **options: Any
) -> Ran:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    from ghoststep.watching.watch import watch

    ran, accelerator = Ran(), accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    hook = keep_losses(model, ran)
    loader: Any = torch.utils.data.DataLoader(list(given), batch_size=None)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer_of(model), loader)
    torch.manual_seed(3)
    w = watch(accelerator.unwrap_model(model), optimizer.optimizer, **options) if watched else None
    try:
        with contextlib.nullcontext() if w is None else w:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                ran.steps += accelerator.sync_gradients
                if w is not None and w.should_stop:
                    break
    finally:
        hook.remove()
    if w is not None:
        ran.report = w.report()
    return ran


Run = Callable[..., Ran]
RUNS = pytest.mark.parametrize("run", [with_trainer, with_lightning, with_accelerate])
