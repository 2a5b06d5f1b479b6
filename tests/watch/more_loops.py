"""Loops that are unlike the plain one: several models or optimizers, adapters, closures, weights that are swapped."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.nn import functional

import ghoststep
from tests.watch.loops import Loop, TinyLM, language_model, next_token_loss, pickled, tokens
from tests.watch.other_loops import lora, mixture, sparse, two_optimizers


def spiking(clip: str, *, spikes: Collection[int] = (4, 9), scaled: bool = True) -> Callable[[], Loop]:
    """A loop that meets most of our hooks: a scaler, a clip, and steps whose gradient norm overflows."""

    def make() -> Loop:
        model = TinyLM(dropout=0.1)
        made = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=scaled)

        def step(i: int) -> torch.Tensor:
            made.zero_grad()
            loss = next_token_loss(model(tokens(i)), tokens(i))
            spike = 1e25 * model.embed.weight[7].sum() if i in spikes else 0.0
            scaler.scale(loss + spike).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(made)
            if clip == "torch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                ghoststep.clip_grad_norm_(model, 1.0)
            scaler.step(made)
            scaler.update()
            return loss

        return Loop(models=[model], optimizers=[[made]], step=step, more=[scaler] if scaled else [])

    return make


def contrastive() -> Loop:
    """One encoder called twice for one loss."""
    model = TinyLM(dropout=0.1)
    made = torch.optim.AdamW([p for n, p in model.named_parameters() if n != "head.weight"], lr=1e-3)

    def step(i: int) -> Tensor:
        made.zero_grad()
        ids = tokens(i, batch=8)
        one, other = (functional.normalize(model.hidden(x).mean(1), dim=-1) for x in (ids, ids.roll(1, 1)))
        loss = functional.cross_entropy(one @ other.T / 0.1, torch.arange(8))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        return loss

    return Loop(models=[model], optimizers=[[made]], step=step)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.question, self.answer = TinyLM(), TinyLM()

    def forward(self, question: Tensor, *, answer: Tensor) -> Tensor:
        one, other = self.question.hidden(question).mean(1), self.answer.hidden(answer).mean(1)
        return functional.cross_entropy(one @ other.T / 6.0, torch.arange(len(one)))


def two_encoders() -> Loop:
    model = TwoTowers()
    made = torch.optim.AdamW([p for n, p in model.named_parameters() if "head" not in n], lr=1e-3)

    def step(i: int) -> Tensor:
        made.zero_grad()
        loss: Tensor = model(tokens(i, batch=8), answer=tokens(i, batch=8).roll(1, 1))
        loss.backward()  # type: ignore[no-untyped-call]
        made.step()
        return loss

    return Loop(models=[model], optimizers=[[made]], step=step)


def two_models() -> Loop:
    """In turns, each with its own watch; gradients stay until the model's own next turn."""
    first, second = language_model()(), language_model(clip="ours")()

    def step(i: int) -> Tensor:
        return first.step(i) + second.step(i)

    return Loop(models=[*first.models, *second.models], optimizers=[*first.optimizers, *second.optimizers], step=step)


def nested() -> Loop:
    """A model, and a part of it that is watched too."""
    loop = language_model()()
    return Loop(models=[loop.models[0], loop.models[0].blocks], optimizers=[loop.optimizers[0]] * 2, step=loop.step)  # type: ignore[list-item]


def adversaries() -> Loop:
    """A generator whose loss goes through the critic; both backwards reach the critic's gradients."""
    maker, critic = TinyLM(), nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (maker, critic)]

    def step(i: int) -> Tensor:
        optimizers[0].zero_grad()
        made = maker.hidden(tokens(i))
        loss = -critic(made).mean() + 0.0 * maker.head.weight.sum()
        loss.backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        judged: Tensor = critic(made.detach()).mean() - critic(torch.ones_like(made)).mean()
        judged.backward()  # type: ignore[no-untyped-call]
        optimizers[1].step()
        return loss + judged  # type: ignore[no-any-return]

    return Loop(models=[maker, critic], optimizers=[[o] for o in optimizers], step=step)


def evaluated() -> Loop:
    """eval(), greedy generation and no_grad forwards between steps, and a forward whose loss nobody uses."""
    loop = language_model(dropout=0.1)()
    (model,) = loop.models

    def step(i: int) -> Tensor:
        loss = loop.step(i)
        if i % 3 == 0:
            model.eval()
            with torch.no_grad():
                ids = tokens(5000 + i)[:, :4]
                for _ in range(4):
                    ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
            with torch.inference_mode():
                model(ids)
            model.train()
            model(ids)
        return loss

    return Loop(models=loop.models, optimizers=loop.optimizers, step=step)


def closures() -> Loop:
    model = TinyLM()
    made = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3, history_size=3)

    def step(i: int) -> Tensor:
        def closure() -> Tensor:
            made.zero_grad()
            loss = next_token_loss(model(tokens(i)), tokens(i))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return torch.as_tensor(made.step(closure))  # type: ignore[no-untyped-call]

    return Loop(models=[model], optimizers=[[made]], step=step)


def averaged() -> Loop:
    """Weights are swapped for their moving average to evaluate, and back."""
    loop = language_model(dropout=0.1)()
    (model,) = loop.models
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]

    def step(i: int) -> Tensor:
        loss = loop.step(i)
        average.update_parameters(model)
        if i % 5 == 4:
            kept = [p.data for p in model.parameters()]
            for p, a in zip(model.parameters(), average.module.parameters(), strict=True):
                p.data = a.data
            with torch.no_grad():
                model(tokens(9000 + i))
            for p, data in zip(model.parameters(), kept, strict=True):
                p.data = data
        return loss

    return Loop(models=loop.models, optimizers=loop.optimizers, step=step, more=[average])


def frozen_midway() -> Loop:
    loop = language_model()()
    (model,) = loop.models
    assert isinstance(model, TinyLM)
    model.blocks[1].requires_grad_(False)

    def step(i: int) -> Tensor:
        if i == 20:
            model.embed.requires_grad_(False)
        if i == 40:
            model.requires_grad_(True)
        return loop.step(i)

    return Loop(models=loop.models, optimizers=loop.optimizers, step=step)


def grown() -> Loop:
    """A group is added midway, and later the optimizer is made anew."""
    model = TinyLM()
    blocks = list(model.blocks.parameters())
    made = [torch.optim.AdamW([p for p in model.parameters() if not any(p is b for b in blocks)], lr=1e-3)]

    def step(i: int) -> Tensor:
        if i == 20:
            made[0].add_param_group({"params": blocks, "lr": 1e-4})
        if i in (35, 45):
            made[0] = torch.optim.AdamW(model.parameters(), lr=1e-3)
        made[0].zero_grad()
        loss = next_token_loss(model(tokens(i)), tokens(i))
        loss.backward()  # type: ignore[no-untyped-call]
        made[0].step()
        return loss

    return Loop(models=[model], optimizers=[[]], step=step)


def copied() -> Loop:
    """Copies of the watched model are trained and saved while it trains."""
    loop = language_model(dropout=0.1)()
    (model,) = loop.models
    copies: list[nn.Module] = [copy.deepcopy(model)]

    def step(i: int) -> Tensor:
        loss = loop.step(i)
        if i % 15 == 0:
            for make in (copy.deepcopy, pickled, copy.copy):
                twin = make(model)
                if make is not copy.copy:
                    next_token_loss(twin(tokens(i)), tokens(i)).backward()  # type: ignore[no-untyped-call]
            copies[0] = copy.deepcopy(model)
        return loss

    return Loop(models=loop.models, optimizers=loop.optimizers, step=step, more=copies)


def in_a_thread() -> Loop:
    """Every second forward runs in another thread, every third step altogether."""
    loop = language_model(dropout=0.1)()
    (model,) = loop.models
    made = loop.optimizers[0][0]
    found: list[Tensor] = []

    def elsewhere(function: Callable[[], Tensor]) -> Tensor:
        thread = threading.Thread(target=lambda: found.append(function()))
        thread.start()
        thread.join()
        return found.pop()

    def step(i: int) -> Tensor:
        if i % 3 == 0:
            return elsewhere(lambda: loop.step(i))
        made.zero_grad()
        logits = elsewhere(lambda: model(tokens(i))) if i % 2 else model(tokens(i))
        loss = next_token_loss(logits, tokens(i))
        loss.backward()  # type: ignore[no-untyped-call]
        made.step()
        return loss

    return Loop(models=loop.models, optimizers=loop.optimizers, step=step)


LOOPS: dict[str, tuple[Callable[[], Loop], int]] = {
    f.__name__.replace("_", " "): (f, 60)
    for f in (
        two_optimizers, sparse, contrastive, two_encoders, two_models, nested, adversaries, evaluated, closures, averaged,
        frozen_midway, grown, copied, in_a_thread, lora, mixture,
    )
}  # fmt: skip
