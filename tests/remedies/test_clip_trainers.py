"""The clip inside Trainer, Lightning and Accelerate: the lines that docs/clip.md gives, on a poisoned and on a healthy run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ghoststep
from tests.small_models import mamba2, with_dead_row

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
TOKEN, V, STEPS = 17, 160, 10


@pytest.fixture(autouse=True)
def quiet() -> None:
    for name in ("ghoststep.clip", "lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


def poisoned() -> Any:
    """A Mamba-2 of 6 layers whose table row 17 has decayed to 1e-30."""
    torch.manual_seed(0)
    return with_dead_row(mamba2(6, vocab_size=V), TOKEN)


def healthy() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def examples(count: int) -> list[dict[str, torch.Tensor]]:
    """The token stands at position 8 of every second example."""
    ids = torch.randint(20, V, (count, 16), generator=torch.Generator().manual_seed(1))
    ids[::2, 8] = TOKEN
    return [{"input_ids": row, "labels": row} for row in ids]


class Lost:
    """Counts steps that the optimizer takes without a single gradient that is not zero."""

    def __init__(self) -> None:
        self.steps = self.zero = 0

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.steps += 1
        self.zero += not any(bool((g != 0).any()) for g in grads)


def optimizer_of(model: torch.nn.Module, lost: Lost) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)
    optimizer.register_step_post_hook(lost)  # Lightning runs the backward pass inside the step
    return optimizer


def with_trainer(model: Any, steps: int, own: bool, tmp_path: Any, max_grad_norm: float = 1.0) -> Lost:
    pytest.importorskip("accelerate")
    if own and not hasattr(transformers.Trainer, "_clip_grad_norm"):
        pytest.skip("this version of transformers has no such hook")

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
            self.accelerator.unscale_gradients()
            return ghoststep.clip_grad_norm_(model, self.args.max_grad_norm)

    lost = Lost()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, max_grad_norm=max_grad_norm, logging_steps=5, lr_scheduler_type="constant", seed=3,
    )  # fmt: skip
    trainer = (Trainer if own else transformers.Trainer)(
        model=model, args=arguments, train_dataset=examples(4 * steps), optimizers=(optimizer_of(model, lost), None)
    )
    trainer.train()
    return lost


def with_accelerate(model: Any, steps: int, own: bool, tmp_path: Any) -> Lost:
    accelerate = pytest.importorskip("accelerate")
    lost, accelerator = Lost(), accelerate.Accelerator(cpu=True)
    loader: Any = torch.utils.data.DataLoader(examples(2 * steps), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model, lost), loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        if own:
            accelerator.unscale_gradients()
            ghoststep.clip_grad_norm_(model, 1.0)
        else:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return lost


def with_lightning(model: Any, steps: int, own: bool, tmp_path: Any) -> Lost:
    lightning = pytest.importorskip("lightning")
    lost = Lost()

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model, lost)

    class Clipped(Module):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
        ) -> None:
            if gradient_clip_val:
                ghoststep.clip_grad_norm_(self, gradient_clip_val)

    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, default_root_dir=str(tmp_path), barebones=False,
    )  # fmt: skip
    model.train()
    trainer.fit((Clipped if own else Module)(), torch.utils.data.DataLoader(examples(2 * steps), batch_size=2))  # type: ignore[arg-type]
    return lost


Run = Callable[..., Lost]
RUNS = pytest.mark.parametrize("run", [with_trainer, with_accelerate, with_lightning])


@RUNS
@pytest.mark.parametrize("how", ["hook", "replaced"])
def test_a_poisoned_run_loses_no_step(run: Run, how: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "hook":
        plain = run(poisoned(), 4, False, tmp_path)
        assert plain.steps == 4
        assert plain.zero > 0
    else:
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", ghoststep.clip_grad_norm_)
    cured = run(poisoned(), 4, how == "hook", tmp_path)
    assert (cured.steps, cured.zero) == (4, 0)


@RUNS
def test_a_healthy_run_ends_with_the_same_bits(run: Run, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, hooked, replaced = healthy(), healthy(), healthy()
    start = [p.detach().clone() for p in plain.parameters()]
    assert run(plain, STEPS, False, tmp_path).steps == STEPS
    run(hooked, STEPS, True, tmp_path)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", ghoststep.clip_grad_norm_)
    run(replaced, STEPS, False, tmp_path)
    for a, b, c in zip(plain.parameters(), hooked.parameters(), replaced.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert not all(torch.equal(a, b) for a, b in zip(start, plain.parameters(), strict=True))


def test_max_grad_norm_of_0_in_trainer_no_longer_ruins_the_model(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer then clips to infinity, only to log the norm: inf / inf makes every weight NaN."""
    model = poisoned()
    with_trainer(model, 3, False, tmp_path, max_grad_norm=0)
    assert all(p.isnan().any() for p in model.parameters())
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", ghoststep.clip_grad_norm_)
    model = poisoned()
    assert with_trainer(model, 3, False, tmp_path, max_grad_norm=0).zero == 0
    assert all(p.isfinite().all() for p in model.parameters())
