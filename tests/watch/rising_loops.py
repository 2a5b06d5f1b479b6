"""Real loops whose loss rises: thrown out of place by an update, or healthy for all that."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.small_models import mamba2
from tests.watch.healthy_loops import trained
from tests.watch.loops import VOCAB, Loop, TinyLM, language_model, next_token_loss, tokens

Maker = Callable[[], Loop]


def looped(model: nn.Module, made: torch.optim.Optimizer, loss_of: Callable[[int], Tensor], *, clip: float = 0.0) -> Loop:
    """The ordinary loop around any loss."""

    def step(i: int) -> Tensor:
        made.zero_grad()
        loss = loss_of(i)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
        return loss

    return Loop(models=[model], optimizers=[[made]], step=step)


def square(said: Tensor, target: Tensor) -> Tensor:
    return (said - target).square().mean()


def sgd(lr: float, momentum: float = 0.0) -> Callable[..., Any]:
    return lambda p: torch.optim.SGD(p, lr=lr, momentum=momentum)


def fine_tuned(lr: float) -> Maker:
    def make() -> Loop:
        model = trained()
        return looped(
            model, torch.optim.AdamW(model.parameters(), lr=lr), lambda i: next_token_loss(model(tokens(i)), tokens(i))
        )

    return make


def hugging_face(build: Callable[[], nn.Module], lr: float, *, clip: float = 0.0) -> Maker:
    def make() -> Loop:
        model = build()

        def loss_of(i: int) -> Tensor:
            return next_token_loss(model(input_ids=tokens(i)).logits, tokens(i))

        return looped(model, torch.optim.AdamW(model.parameters(), lr=lr), loss_of, clip=clip)

    return make


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64))


def mamba() -> nn.Module:
    made: nn.Module = mamba2(2, vocab_size=VOCAB, state_size=8, chunk_size=8)
    return made


class Regression(nn.Module):
    """A number, or several, for each text."""

    def __init__(self, out: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, out))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(ids).mean(1))
        return out


def value_function(lr: float, growth: float) -> Maker:
    """PPO's value loss while returns grow: from 0.001 to hundreds, the gradient norm with it."""

    def make() -> Loop:
        model = Regression()

        def loss_of(i: int) -> Tensor:
            ids = tokens(i, batch=16)
            target = (0.1 + growth * i) * ids.float().mean(1) / 32
            return 0.5 * square(model(ids).squeeze(1), target)

        return looped(model, torch.optim.AdamW(model.parameters(), lr=lr), loss_of, clip=1.0)

    return make


def divergence_from_reference(lr: float) -> Maker:
    """A KL term that starts at 0, and a weak reward that pulls away."""

    def make() -> Loop:
        model = TinyLM()
        reference = copy.deepcopy(model).requires_grad_(False)

        def loss_of(i: int) -> Tensor:
            ours, theirs = model(tokens(i)).log_softmax(-1), reference(tokens(i)).log_softmax(-1)
            away: Tensor = (ours.exp() * (ours - theirs)).sum(-1).mean() + 1e-3 * (1 - ours[..., 5].exp().mean())
            return away

        return looped(model, torch.optim.AdamW(model.parameters(), lr=lr), loss_of)

    return make


def denoiser(lr: float, seed: int = 0) -> Maker:
    """Diffusion-like: the weight of a batch spreads over orders of magnitude."""

    def make() -> Loop:
        model = Regression(out=32)

        def loss_of(i: int) -> Tensor:
            chance = torch.Generator().manual_seed(i + 977 * seed)
            weight = math.exp(1.5 * float(torch.randn((), generator=chance)))
            return weight * square(model(tokens(i, batch=2)), torch.randn(2, 32, generator=chance))

        return looped(model, torch.optim.AdamW(model.parameters(), lr=lr), loss_of, clip=1.0)

    return make


def catapult(lr: float, width: int, seed: int) -> Maker:
    """A learning rate above the edge of stability: the loss rises a hundredfold, the curvature falls, and it learns."""

    def make() -> Loop:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, width, bias=False), nn.Identity(), nn.Linear(width, 1, bias=False))
        with torch.no_grad():
            for weight in model.parameters():
                nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]))
        x = torch.randn(32, 8)
        return looped(model, torch.optim.SGD(model.parameters(), lr=lr), lambda i: square(model(x), 0.3 * x[:, :1]))

    return make


def generator(lr: float) -> Maker:
    """The generator of a GAN, whose loss rises as the discriminator learns."""

    def make() -> Loop:
        made = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
        judge = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
        for p in (*made.parameters(), *judge.parameters()):
            nn.init.normal_(p, std=0.05)
        ours, theirs = (torch.optim.Adam(m.parameters(), lr=lr, betas=(0.5, 0.999)) for m in (made, judge))

        def step(i: int) -> Tensor:
            chance = torch.Generator().manual_seed(i)
            real, z = torch.randn(32, 8, generator=chance) + 2, torch.randn(32, 8, generator=chance)
            theirs.zero_grad()
            lies = functional.softplus(-judge(real)).mean() + functional.softplus(judge(made(z).detach())).mean()
            lies.backward()  # type: ignore[no-untyped-call]
            theirs.step()
            ours.zero_grad()
            loss = functional.softplus(-judge(made(z))).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            ours.step()
            return loss

        return Loop(models=[made], optimizers=[[ours]], step=step)

    return make


def lengthening(reduction: str) -> Maker:
    """A curriculum from short to long."""

    def make() -> Loop:
        model = TinyLM()

        def loss_of(i: int) -> Tensor:
            ids = tokens(i, length=4 + i // 3)
            return next_token_loss(model(ids), ids, reduction)

        return looped(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_of, clip=1.0)

    return make


def spoilt_batch(bad: int) -> Maker:
    """A regression that has learned, and one batch whose targets come in another unit."""

    def make() -> Loop:
        model = Regression()

        def loss_of(i: int) -> Tensor:
            ids = tokens(i, batch=16)
            target = ids.float().mean(1) / 32 * (40.0 if i == bad else 1.0) + 0.2 * torch.sin(torch.arange(16.0) + i)
            return 20 * square(model(ids).squeeze(1), target)

        return looped(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_of, clip=1.0)

    return make


def unlabelled(guard: str, *, is_bad: Callable[[int], bool], clip: float = 1.0) -> Maker:
    """Some batches have no label left, and the loss guards itself. guard: how; "one label": one is left, "none": no batch is bad."""

    def make() -> Loop:
        model = TinyLM()

        def loss_of(i: int) -> Tensor:
            ids = tokens(i)
            labels = ids[:, 1:].clone()
            if is_bad(i):
                labels[:] = -100
                if guard == "one label":
                    labels[0, 0] = ids[0, 1]
            scores = model(ids)[:, :-1].flatten(0, 1)
            if guard == "nan_to_num":
                return functional.cross_entropy(scores, labels.flatten(), ignore_index=-100).nan_to_num(0.0)
            total = functional.cross_entropy(scores, labels.flatten(), ignore_index=-100, reduction="sum")
            return total / max(1, int((labels >= 0).sum()))

        return looped(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_of, clip=clip)

    return make


def cleared(when: str) -> Maker:
    """zero_grad at the wrong place in step 6: "before clipping" or "after clipping"."""

    def make() -> Loop:
        model = TinyLM()
        made = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def step(i: int) -> Tensor:
            made.zero_grad()
            loss = next_token_loss(model(tokens(i)), tokens(i))
            loss.backward()  # type: ignore[no-untyped-call]
            if i == 5 and when == "before clipping":
                made.zero_grad(set_to_none=False)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if i == 5 and when == "after clipping":
                made.zero_grad(set_to_none=False)
            made.step()
            return loss

        return Loop(models=[model], optimizers=[[made]], step=step)

    return make


def rising(to: float, steps: int) -> Callable[[int], float]:
    """A linear warm-up, as the factor of the learning rate."""
    return lambda i: to * min(1.0, i / steps)


DIVERGING: dict[str, Maker] = {
    "AdamW 1": language_model(lr=1.0),
    "AdamW 10, not clipped": language_model(lr=10.0, clip=""),
    "SGD 10, momentum": language_model(optimizer=sgd(10.0, 0.9)),
    "SGD 100": language_model(optimizer=sgd(100.0)),
    "a warm-up to 10": language_model(lr=1.0, schedule=rising(10.0, 40)),
    "fine-tuning, 10,000 times its rate": fine_tuned(0.2),
    "llama, AdamW 1": hugging_face(llama, 1.0),
    "llama, AdamW 10": hugging_face(llama, 10.0, clip=1.0),
    "GPT-2, AdamW 1": hugging_face(gpt2, 1.0, clip=1.0),
    "Mamba-2, AdamW 10": hugging_face(mamba, 10.0),
}
"""Learning rates that are far too large. All are found within 40 steps."""

RISING: dict[str, Maker] = {
    "large rates that still learn": language_model(lr=0.03),
    "AdamW 0.1": language_model(lr=0.1, clip=""),
    "SGD 1": language_model(optimizer=sgd(1.0)),
    "a warm-up from 0": language_model(lr=0.03, schedule=rising(1.0, 40)),
    "llama, AdamW 0.1": hugging_face(llama, 0.1),
    "Mamba-2, AdamW 0.1": hugging_face(mamba, 0.1),
    "fine-tuning, 1,000 times its rate": fine_tuned(0.02),
    "a value loss": value_function(3e-4, 0.5),
    "a value loss at a large rate": value_function(3e-2, 0.5),
    "a KL term": divergence_from_reference(3e-2),
    "noise": denoiser(1e-3),
    "noise at a large rate": denoiser(3e-2, seed=21),
    "catapult": catapult(0.02, 256, 1),
    "catapult, wide": catapult(0.0025, 2048, 1),
    "catapult, a hundredfold": catapult(0.025, 256, 1),
    "a generator": generator(1e-3),
    "longer texts, mean": lengthening("mean"),
    "longer texts, sum": lengthening("sum"),
}
"""Healthy, or at least learning again within 16 steps."""
