"""Training loops with tiny models, run with and without a watch, and everything that must not differ between the two."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ghoststep
from ghoststep.evidence.steps import Step
from ghoststep.watching import patches
from ghoststep.watching.watch import Watch, watch

__all__ = ["Loop", "Ran", "TinyLM", "Watch", "language_model", "patches", "run", "same", "steps_of", "tokens", "watch"]

VOCAB = 64


class Block(nn.Module):
    def __init__(self, d: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        added: Tensor = self.mlp(self.norm_2(x))
        return x + added


class TinyLM(nn.Module):
    """A causal language model with a buffer that its forward changes. reentrant: None for no checkpointing."""

    calls: Tensor

    def __init__(
        self, *, d: int = 32, tied: bool = False, dropout: float = 0.0, reentrant: bool | None = None, sparse: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, d, sparse=sparse)
        self.blocks = nn.ModuleList(Block(d, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)
        if tied:
            self.head.weight = self.embed.weight
        self.reentrant = reentrant
        self.register_buffer("calls", torch.zeros(()))

    def hidden(self, ids: Tensor) -> Tensor:
        self.calls += 1
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        out: Tensor = self.norm(x)
        return out

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(ids))
        return logits


def tokens(i: int, *, batch: int = 4, length: int = 12, first: int = 0) -> Tensor:
    """Sequences that can be learned, of step i; no use of the global random numbers."""
    random_numbers = torch.Generator().manual_seed(1000 + i)
    ids = [torch.randint(first, VOCAB, (batch,), generator=random_numbers)]
    for _ in range(length - 1):
        noise = torch.randint(first, VOCAB, (batch,), generator=random_numbers)
        is_noise = torch.rand(batch, generator=random_numbers) < 0.3
        ids.append(torch.where(is_noise, noise, first + (5 * (ids[-1] - first) + 3) % (VOCAB - first)))
    return torch.stack(ids, dim=1)


def next_token_loss(logits: Tensor, ids: Tensor, reduction: str = "mean") -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction=reduction)


@dataclass(slots=True, kw_only=True)
class Loop:
    """models and the optimizers of each; step(i) trains once and returns the loss. more: whatever else has a state."""

    models: list[nn.Module]
    optimizers: list[list[Any]]
    step: Callable[[int], Tensor]
    more: list[Any] = field(default_factory=list)
    watched: list[nn.Module] | None = None


@dataclass(slots=True, kw_only=True)
class Ran:
    """Everything that a run leaves behind: bits by name."""

    state: dict[str, Any]
    watches: list[Watch]
    loop: Loop


def run(
    make: Callable[[], Loop], steps: int, folder: Path | None = None, *, starts_at: int = 0,
    each: Callable[[Watch, int], None] | None = None, **wishes: Any,
) -> Ran:  # fmt: skip
    """Train; watched if wishes are given. starts_at: the watch starts after so many steps. each: called after every step."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    loop = make()
    watches: list[Watch] = []
    losses = []
    with contextlib.ExitStack() as stack:
        for i in range(steps):
            if wishes and i == starts_at:
                for number, (model, optimizers) in enumerate(zip(loop.watched or loop.models, loop.optimizers, strict=True)):
                    run_dir = None if folder is None else folder / f"run{number}"
                    made = watch(model, optimizers or None, run_dir=run_dir, **wishes)
                    watches.append(stack.enter_context(made))
            losses.append(loop.step(i).detach().clone())
            if each is not None:
                for made in watches:
                    each(made, i)
    return Ran(state=_state(loop, losses), watches=watches, loop=loop)


def _state(loop: Loop, losses: Sequence[Tensor]) -> dict[str, Any]:
    return {
        "losses": losses,
        "models": [dict(m.state_dict()) for m in loop.models],
        "modes": [[m.training for m in model.modules()] for model in loop.models],
        "gradients": [{n: p.grad for n, p in m.named_parameters()} for m in loop.models],
        "optimizers": [[o.state_dict() for o in optimizers] for optimizers in loop.optimizers],
        "more": [m.state_dict() for m in loop.more],
        "random": [torch.get_rng_state(), np.random.get_state(), random.getstate()],
    }


def same(one: Any, other: Any, path: str = "") -> None:
    """The same bits, everywhere inside."""
    assert type(one) is type(other), path
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype, path
        assert one.layout == other.layout, path
        a, b = (t.detach().coalesce().to_dense() if t.is_sparse else t.detach() for t in (one, other))
        assert a.shape == b.shape, path
        assert a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8)), path
    elif isinstance(one, np.ndarray):
        assert one.tobytes() == other.tobytes(), path
    elif isinstance(one, Mapping):
        assert list(one) == list(other), path
        for key in one:
            same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{path}/{i}")
    else:
        assert one == other or str(one) == str(other) == "nan", path


def steps_of(watched: Watch) -> list[Step]:
    """Every step of a watch that has ended or was flushed."""
    return list(watched.flusher.kept)


def language_model(
    *, tied: bool = False, dropout: float = 0.0, reentrant: bool | None = None, clip: str = "torch", autocast: Any = None,
    init_scale: float = 0.0, accumulate: int = 1, schedule: Callable[[int], float] | None = None, reduction: str = "mean",
    optimizer: Callable[..., Any] | None = None, backend: str = "", lr: float = 3e-3, warm: bool = False,
) -> Callable[[], Loop]:  # fmt: skip
    """A maker of the plain loop and its variants. init_scale: of a GradScaler, 0 for none. backend: of torch.compile."""

    def make() -> Loop:
        model = TinyLM(tied=tied, dropout=dropout, reentrant=reentrant)
        called: Any = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        made = optimizer(model.parameters()) if optimizer else torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=20) if init_scale else None
        planned = torch.optim.lr_scheduler.LambdaLR(made, schedule) if schedule else None
        if warm:
            called(tokens(10_000)).sum().backward()

        def step(i: int) -> Tensor:
            made.zero_grad()
            total = torch.zeros(())
            for j in range(accumulate):
                ids = tokens(accumulate * i + j)
                with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                    loss = next_token_loss(called(ids), ids, reduction) / accumulate
                (scaler.scale(loss) if scaler else loss).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            if scaler:
                scaler.unscale_(made)
            if clip == "torch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            elif clip == "ours":
                ghoststep.clip_grad_norm_(model, 1.0)
            scaler.step(made) if scaler else made.step()
            if scaler:
                scaler.update()
            if planned:
                planned.step()
            return total

        more = [m for m in (scaler, planned) if m is not None]
        return Loop(models=[model], optimizers=[[made]], step=step, more=more, watched=[called] if backend else None)

    return make


def pickled(thing: Any) -> Any:
    """There and back through `torch.save`, and through pickle itself."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    same(dict(loaded.state_dict()), dict(pickle.loads(pickle.dumps(thing)).state_dict()))
    return loaded


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
