"""Loops that clear their gradients, each in its own way, and loops that do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.watch.loops import Loop, TinyLM, next_token_loss, tokens
from tests.watch.other_loops import MuonLike


def loss_of(model: nn.Module, i: int) -> Tensor:
    return next_token_loss(model(tokens(i)), tokens(i))


def loop(
    before: Callable[[nn.Module, Any], None] | None = None, between: Callable[[nn.Module, Any], None] | None = None,
    after: Callable[[nn.Module, Any], None] | None = None, *, micro: int = 1, clip: bool = True,
) -> Callable[[], Loop]:  # fmt: skip
    """before: the first backward; between: the last backward and the step; after: the step."""

    def make() -> Loop:
        model = TinyLM()
        made = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(i: int) -> Tensor:
            if before:
                before(model, made)
            for j in range(micro):
                loss = loss_of(model, micro * i + j) / micro
                loss.backward()  # type: ignore[no-untyped-call]
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if between:
                between(model, made)
            made.step()
            if after:
                after(model, made)
            return loss

        return Loop(models=[model], optimizers=[[made]], step=step)

    return make


def cleared(model: nn.Module, made: Any) -> None:
    made.zero_grad()


def zeroed(model: nn.Module, made: Any) -> None:
    made.zero_grad(set_to_none=False)


def zeroed_unseen(model: nn.Module, made: Any) -> None:
    """As in old tutorials: a write that no version counts."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.zero_()


def of_the_model(model: nn.Module, made: Any) -> None:
    model.zero_grad()


def faded(model: nn.Module, made: Any) -> None:
    """A momentum by hand."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def replaced(model: nn.Module, made: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad.clone()


def every_fourth() -> Loop:
    """Two optimizers; one steps, and is cleared, every fourth time."""
    model = TinyLM()
    slow = torch.optim.SGD(model.embed.parameters(), lr=1e-3)
    fast = torch.optim.AdamW([p for n, p in model.named_parameters() if not n.startswith("embed")], lr=1e-3)

    def step(i: int) -> Tensor:
        fast.zero_grad()
        loss = loss_of(model, i)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        fast.step()
        if i % 4 == 3:
            slow.step()
            slow.zero_grad()
        return loss

    return Loop(models=[model], optimizers=[[slow, fast]], step=step)


def faded_by(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.mul_(0.5)


def cleared_in_turns(clear: Callable[[Any], None] = lambda o: o.zero_grad()) -> Loop:
    """Each optimizer is cleared right after its own step."""
    model = TinyLM()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "block" in n]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [MuonLike(matrices), torch.optim.AdamW(others, lr=3e-3)]

    def step(i: int) -> Tensor:
        loss = loss_of(model, i)
        loss.backward()  # type: ignore[no-untyped-call]
        for o in optimizers:
            o.step()
            clear(o)
        return loss

    return Loop(models=[model], optimizers=[optimizers], step=step)


def critic_cleared_late() -> Loop:
    """A generator's loss fills the critic's gradients, which are cleared only before the critic's own backward."""
    maker, critic = nn.Linear(4, 32), nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (maker, critic)]

    def step(i: int) -> Tensor:
        noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
        optimizers[0].zero_grad(set_to_none=False)
        loss = -critic(maker(noise)).mean()
        loss.backward()
        optimizers[0].step()
        optimizers[1].zero_grad(set_to_none=False)
        judged: Tensor = critic(maker(noise).detach()).mean() - critic(torch.ones(8, 32)).mean()
        judged.backward()  # type: ignore[no-untyped-call]
        optimizers[1].step()
        return judged

    return Loop(models=[maker, critic], optimizers=[[o] for o in optimizers], step=step)


def in_backward(set_to_none: bool) -> Callable[[], Loop]:
    """One optimizer a parameter, which steps and clears as soon as the gradient is there."""

    def make() -> Loop:
        model = TinyLM()
        made = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}

        def use(p: Tensor) -> None:
            made[p].step()  # type: ignore[index]
            made[p].zero_grad(set_to_none=set_to_none)  # type: ignore[index]

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(use)  # type: ignore[no-untyped-call]

        def step(i: int) -> Tensor:
            loss = loss_of(model, i)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return Loop(models=[model], optimizers=[list(made.values())], step=step)

    return make


def scaled(clears: bool, init_scale: float = 2.0**16) -> Callable[[], Loop]:
    """Under a GradScaler, whose first steps are skipped where the scale is large."""

    def make() -> Loop:
        model = TinyLM()
        made = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=20)

        def step(i: int) -> Tensor:
            if clears:
                made.zero_grad(set_to_none=False)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model, i)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(made)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(made)
            scaler.update()
            return loss

        return Loop(models=[model], optimizers=[[made]], step=step, more=[scaler])

    return make


def replayed() -> Loop:
    """Gradients that something else than a backward we see writes into the same tensors, as a replayed CUDA graph does, while another
    model trains by backwards."""
    model, other = TinyLM(), nn.Linear(2, 2)
    made = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(i: int) -> Tensor:
        other(torch.ones(2)).sum().backward()
        loss = loss_of(model, i)
        found = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), found, strict=True):
                if p.grad is None:
                    p.grad = g.clone()
                p.grad.data.copy_(g)
        made.step()
        return loss

    return Loop(models=[model], optimizers=[[made]], step=step)


def closure(clears: bool) -> Callable[[], Loop]:
    """The backward runs inside the step, as Lightning and LBFGS have it."""

    def make() -> Loop:
        model = TinyLM()
        made = torch.optim.SGD(model.parameters(), lr=1e-2)

        def step(i: int) -> Tensor:
            def inside() -> Tensor:
                loss = loss_of(model, i)
                if clears:
                    made.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            return torch.as_tensor(made.step(inside))

        return Loop(models=[model], optimizers=[[made]], step=step)

    return make


def of_another_optimizer() -> Loop:
    """`zero_grad` of an optimizer that was made first and does not step any more."""
    model, other = TinyLM(), nn.Linear(2, 2)
    old, made = torch.optim.AdamW(other.parameters()), torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(i: int) -> Tensor:
        old.zero_grad()
        loss = loss_of(model, i)
        loss.backward()  # type: ignore[no-untyped-call]
        made.step()
        return loss

    return Loop(models=[model], optimizers=[[made]], step=step)


def one_of_two() -> Loop:
    """Two optimizers, of which one is never cleared."""
    made = cleared_in_turns()
    first, second = made.optimizers[0]
    (model,) = made.models

    def step(i: int) -> Tensor:
        first.zero_grad()
        loss = loss_of(model, i)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in (first, second):
            o.step()
        return loss

    return Loop(models=[model], optimizers=[[first, second]], step=step)


def cleared_early() -> Loop:
    """Gradients that a generator left in its critic are cleared, in place, before the generator steps."""
    made = critic_cleared_late()
    maker, critic = made.models
    optimizers = [o for (o,) in made.optimizers]

    def step(i: int) -> Tensor:
        noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
        optimizers[0].zero_grad(set_to_none=False)
        (-critic(maker(noise)).mean()).backward()
        optimizers[1].zero_grad(set_to_none=False)
        optimizers[0].step()
        judged: Tensor = critic(maker(noise).detach()).mean() - critic(torch.ones(8, 32)).mean()
        judged.backward()  # type: ignore[no-untyped-call]
        optimizers[1].step()
        return judged

    joint = nn.ModuleList([maker, critic])
    return Loop(models=[joint], optimizers=[optimizers], step=step)


CLEARED: dict[str, Callable[[], Loop]] = {
    f"{name}, {place}": loop(**{place: how})
    for (name, how), place in itertools.product(
        {"None": cleared, "zeros": zeroed, "zeros unseen": zeroed_unseen, "of the model": of_the_model, "faded": faded}.items(),
        ("before", "after"),
    )
} | {
    "accumulation": loop(zeroed, micro=4),
    "accumulation, unseen": loop(after=zeroed_unseen, micro=4, clip=False),
    "every fourth": every_fourth,
    "in turns": cleared_in_turns,
    "in turns, zeros": lambda: cleared_in_turns(lambda o: o.zero_grad(set_to_none=False)),
    "in turns, faded": lambda: cleared_in_turns(faded_by),
    "a critic that is cleared late": critic_cleared_late,
    "a critic that is cleared early": cleared_early,
    "scaler": scaled(clears=True),
    "scaler that skips": scaled(clears=True, init_scale=2.0**40),
    "closure": closure(clears=True),
}
UNTOLD: dict[str, Callable[[], Loop]] = {
    "in backward, None": in_backward(True),
    "in backward, zeros": in_backward(False),
    "replayed": replayed,
    "replaced by hand": loop(between=replaced),
}
KEPT: dict[str, Callable[[], Loop]] = {
    "never": loop(),
    "never, without a clip": loop(clip=False),
    "never, accumulation": loop(micro=3),
    "scaler": scaled(clears=False),
    "closure": closure(clears=False),
    "of another optimizer": of_another_optimizer,
    "one of two": one_of_two,
}
