"""Models that keep something beside their parameters, and tiny models of the library, for the proof that nothing changes.

Every maker gives (model, batches, loss_fn or None); the loss is the model's own where there is no loss_fn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

V, D, T = 40, 16, 10

Made = tuple[nn.Module, list[dict[str, torch.Tensor]], Any]


def ids(seed: int, *, size: int = 3, length: int = T) -> torch.Tensor:
    return torch.randint(3, V, (size, length), generator=torch.Generator().manual_seed(seed))


def batches(*, length: int = T) -> list[dict[str, torch.Tensor]]:
    found = []
    for seed in range(2):
        tokens = ids(seed, length=length)
        keep = torch.ones_like(tokens)
        keep[1, -3:] = 0
        labels = tokens.masked_fill(keep == 0, -100)
        found.append({"input_ids": tokens.masked_fill(keep == 0, 0), "attention_mask": keep, "labels": labels})
    return found


def next_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    out = model(batch["input_ids"])
    out = out["logits"] if isinstance(out, dict) else out[-1] if isinstance(out, tuple) else out
    return next_token(out, batch["labels"])


def popping_loss(model: Any, batch: Any) -> torch.Tensor:
    """Takes the labels out of the batch, as trainers do, and overwrites them in place."""
    labels = batch.pop("labels")
    labels[labels == 0] = -100
    out = model(batch["input_ids"])
    return next_token(out[-1] if isinstance(out, tuple) else out, labels)


class Drawing:
    """A loss that hides tokens with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        hidden = torch.rand(batch["input_ids"].shape, generator=self.generator) < 0.3
        hidden[:, :2] = True
        labels = batch["labels"].masked_fill(~hidden, -100)
        logits = model(batch["input_ids"].masked_fill(hidden, 1))
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Stateful(nn.Module):
    """An embedding, a running mean, and between them a part that keeps something of its own."""

    def __init__(self, part: nn.Module, *, sparse: bool = False, max_norm: float | None = None, shape: str = "tensor") -> None:
        super().__init__()
        self.embed, self.part, self.shape = nn.Embedding(V, D, sparse=sparse, max_norm=max_norm), part, shape
        self.mix, self.head = nn.Linear(D, D), nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor) -> Any:
        x = self.embed(input_ids).to(self.mix.weight.dtype)
        steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]
        logits = self.head(x + self.part(torch.tanh(self.mix(x.cumsum(1) / steps))))
        return {"logits": logits} if self.shape == "dict" else (x, logits) if self.shape == "tuple" else logits


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return out


class Rotary(nn.Module):
    """Makes its tables at the first forward and grows them with the longest sequence seen: a buffer, a number, a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0
        self.sines: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            angles = torch.arange(self.longest)[:, None] / 10 ** torch.linspace(0, 1, D)
            self.register_buffer("cosines", angles.cos(), persistent=False)
            self.sines = angles.sin()
        assert self.sines is not None
        cosines: Any = self.cosines
        return x * cosines[: x.shape[1]].to(x.dtype) + x.roll(1, -1) * self.sines[: x.shape[1]].to(x.dtype)


class Annealed(nn.Module):
    """Counts its calls and gets stronger with them; keeps the last outputs in a queue and the sum in a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.strength = 0, 0.1
        self.last: deque[float] = deque(maxlen=4)
        self.seen: dict[int, int] = {}
        self.total = torch.zeros(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.strength *= 1.1
        self.seen[x.shape[1]] = self.seen.get(x.shape[1], 0) + 1
        self.total += x.detach().float().mean((0, 1))
        self.last.append(float(self.total.mean()))
        return x * self.strength * (1 + self.calls) + sum(self.last)


class OwnNoise(nn.Module):
    """Noise by a generator of its own, and by numpy's and Python's."""

    def __init__(self) -> None:
        super().__init__()
        import random

        import numpy as np

        self.generator = torch.Generator().manual_seed(7)
        self.numbers, self.dice = np.random.default_rng(7), random.Random(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        noise = torch.randn(x.shape, generator=self.generator).to(x.dtype)
        return x + 0.1 * noise * float(self.numbers.random()) * self.dice.random()


class FirstBatch(nn.Module):
    """Scales its output by what the first batch shows, and writes that into a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(D)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.ready = 1
            self.scale.data.copy_(1 / (x.detach().float().std((0, 1)) + 0.1))
        return x * self.scale


def _stateful(part: Callable[[], nn.Module], loss: Any = None, **more: Any) -> Callable[[], Made]:
    return lambda: (Stateful(part(), **more), batches(), loss or loss_of)


def _drawing() -> Made:
    return Stateful(nn.Dropout(0.1)), batches(), Drawing()


def _weight_norm() -> Made:
    model = Stateful(torch.nn.utils.spectral_norm(nn.Linear(D, D)))
    model.mix = torch.nn.utils.weight_norm(model.mix)
    return model, batches(), loss_of


def _parametrised() -> Made:
    model = Stateful(nn.Identity())
    torch.nn.utils.parametrizations.spectral_norm(model.mix)
    return model, batches(), loss_of


class _Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(D, D), nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
        nn.init.zeros_(self.b.weight)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.b(self.a(x))
        return out


def _library(name: str, *, checkpointing: bool = False, length: int = T, **more: Any) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        size: dict[str, Any] = {
            "vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32, **more,
        }  # fmt: skip
        if name not in ("GPT2", "T5", "Mamba"):
            size["intermediate_size"] = 24
        if name == "T5":
            size = {
                "vocab_size": V,
                "d_model": D,
                "d_kv": 8,
                "d_ff": 24,
                "num_layers": 1,
                "num_heads": 2,
                "decoder_start_token_id": 0,
            }
        kinds = {"T5": "T5ForConditionalGeneration", "Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel"}
        config = getattr(transformers, f"{name}Config")(**size)
        model = getattr(transformers, kinds.get(name, f"{name}ForCausalLM"))(config)
        if checkpointing:
            model.gradient_checkpointing_enable()
        return model, batches(length=length), None

    return make


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
FAMILIES: dict[str, Callable[[], Made]] = {
    "llama": _library("Llama"),
    "llama, tied": _library("Llama", tie_word_embeddings=True),
    "llama, checkpointed": _library("Llama", checkpointing=True),
    "llama, dynamic rotary": _library("Llama", length=24, max_position_embeddings=16, rope_parameters=ROPE),
    "gpt2 with dropout": _library("GPT2"),
    "mamba": _library("Mamba", state_size=4, expand=2),
    "mixtral": _library(
        "Mixtral", num_local_experts=4, num_key_value_heads=2, router_jitter_noise=0.1, output_router_logits=True
    ),
    "bert": _library("Bert"),
    "t5": _library("T5"),
    "dict output": _stateful(nn.Identity, shape="dict"),
    "tuple output": _stateful(nn.Identity, popping_loss, shape="tuple"),
    "labels popped": _stateful(lambda: nn.Dropout(0.2), popping_loss),
    "tokens hidden by the loss": _drawing,
    "batch norm": _stateful(Norm),
    "lazy rotary tables": _stateful(Rotary),
    "counting": _stateful(Annealed),
    "noise of its own": _stateful(OwnNoise),
    "set by the first batch": _stateful(FirstBatch),
    "rows kept short": _stateful(nn.Identity, max_norm=0.5),
    "sparse gradients": _stateful(nn.Identity, sparse=True),
    "old weight and spectral norm": _weight_norm,
    "parametrised": _parametrised,
    "low-rank adapter": _stateful(_Lora),
}
