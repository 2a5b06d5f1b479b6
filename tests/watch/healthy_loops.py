"""Healthy trainings that look unusual: flat losses, zero gradients, one trainable tensor, skipped steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.small_models import mamba2
from tests.watch.loops import VOCAB, Loop, TinyLM, language_model, next_token_loss, tokens
from tests.watch.more_loops import contrastive, evaluated, two_models
from tests.watch.other_loops import hugging_face, lora, mixture, sparse, two_optimizers


def warm_up(i: int) -> float:
    """From 0, then constant."""
    return min(1.0, i / 20)


def cosine(i: int) -> float:
    """To 0 at step 109 and after."""
    return 0.5 * (1 + math.cos(math.pi * min(i, 109) / 109))


def trained(num_steps: int = 150) -> TinyLM:
    """A model that has learned, as a pretrained one has."""
    loop = language_model()()
    for i in range(num_steps):
        loop.step(20_000 + i)
    (model,) = loop.models
    assert isinstance(model, TinyLM)
    return model


def log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(1)  # type: ignore[no-any-return]


def clipped(model: nn.Module, made: torch.optim.Optimizer) -> Loop:
    """The ordinary loop."""

    def step(i: int) -> Tensor:
        made.zero_grad()
        loss = next_token_loss(model(tokens(i)), tokens(i))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        return loss

    return Loop(models=[model], optimizers=[[made]], step=step)


def tuned() -> Loop:
    """SFT of a pretrained model at a small learning rate: the loss is flat."""
    model = trained()
    return clipped(model, torch.optim.AdamW(model.parameters(), lr=2e-5))


def preferences() -> Loop:
    """DPO: starts at ln 2, and stays near it."""
    model = trained()
    reference = copy.deepcopy(model).requires_grad_(False)
    made = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(i: int) -> Tensor:
        made.zero_grad()
        chosen, rejected = tokens(i), tokens(50_000 + i).flip(1)
        with torch.no_grad():
            base = log_probabilities(reference, chosen) - log_probabilities(reference, rejected)
        margin = log_probabilities(model, chosen) - log_probabilities(model, rejected) - base
        loss = -functional.logsigmoid(0.1 * margin).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        return loss

    return Loop(models=[model], optimizers=[[made]], step=step)


def rewards() -> Loop:
    """GRPO: in two steps of three all answers of the group get the same reward, so that loss and all gradients are exactly zero."""
    model = trained()
    made = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)

    def step(i: int) -> Tensor:
        made.zero_grad()
        ids = tokens(i)
        reward = torch.tensor([1.0, 0.0, 1.0, 0.0]) if i % 3 == 0 else torch.ones(4)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        own = log_probabilities(model, ids)
        loss = -(torch.exp(own - own.detach()) * advantage).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        return loss

    return Loop(models=[model], optimizers=[[made]], step=step)


def inverted() -> Loop:
    """Textual inversion: only the table trains, and of it only new rows get a gradient."""
    model = trained()
    model.requires_grad_(False)
    model.embed.weight.requires_grad_(True)
    kept = torch.zeros(VOCAB, 1)
    kept[-2:] = 1.0
    model.embed.weight.register_hook(lambda g: g * kept)  # type: ignore[no-untyped-call]
    made = torch.optim.AdamW([model.embed.weight], lr=5e-3, weight_decay=0.0)

    def step(i: int) -> Tensor:
        made.zero_grad()
        ids = tokens(i)
        ids[:, 3] = VOCAB - 1
        loss = next_token_loss(model(ids), ids)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        return loss

    return Loop(models=[model], optimizers=[[made]], step=step)


def gated() -> Loop:
    """A Mamba-2 whose rows are healthy; input and output tables apart."""
    return hugging_face(mamba2(2, vocab_size=VOCAB, state_size=8, chunk_size=8), lr=1e-3, generates=False)


def moved_in_float16(init_scale: float) -> Callable[[], Loop]:
    return language_model(autocast=torch.float16, init_scale=init_scale)


class PureBfloat16(nn.Module):
    """All weights in bf16, as in many fine-tunings."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyLM().to(torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.inner(ids)
        return out


def pure_bfloat16() -> Loop:
    model = PureBfloat16()
    return clipped(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def converged() -> Loop:
    """A linear fit by LBFGS: done within its first step, and every later one ends where it began."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    made = torch.optim.LBFGS(model.parameters())
    x = torch.randn(64, 8)

    def step(i: int) -> Tensor:
        def closure() -> Tensor:
            made.zero_grad()
            loss: Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return torch.as_tensor(made.step(closure))  # type: ignore[no-untyped-call]

    return Loop(models=[model], optimizers=[[made]], step=step)


HEALTHY: dict[str, Any] = {
    "fp32": language_model(),
    "bf16": language_model(autocast=torch.bfloat16),
    "pure bf16": pure_bfloat16,
    "fp16 + scaler": moved_in_float16(2.0**16),
    "fp16, early skips": moved_in_float16(2.0**26),
    "bf16 + scaler that doubled for long": language_model(autocast=torch.bfloat16, init_scale=2.0**70),
    "LBFGS, converged": converged,
    "LoRA": lora,
    "MoE": mixture,
    "accumulation": language_model(accumulate=4),
    "warm-up from 0": language_model(schedule=warm_up),
    "cosine to 0": language_model(schedule=cosine),
    "dropout": language_model(dropout=0.2),
    "tied": language_model(tied=True),
    "untied gated": gated,
    "SFT": tuned,
    "GRPO": rewards,
    "DPO": preferences,
    "sum-reduced loss": language_model(reduction="sum"),
    "textual inversion": inverted,
    "Muon-like + AdamW": two_optimizers,
    "eval and generate": evaluated,
    "two models": two_models,
    "contrastive": contrastive,
    "sparse": sparse,
}
