"""Small models and losses for the loss X-ray, and its slow twin: the definition, by plain autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

B, T, D, V = 3, 12, 16, 40

Logits = Callable[[torch.Tensor], torch.Tensor]


class Tiny(nn.Module):
    """A causal model of one's own: embedding, a running mean of the past, a head. `transform` acts on the head's output."""

    def __init__(
        self, *, num_heads: int = 1, transform: Logits | None = None, tied: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, D)
        self.mix = nn.Linear(D, D)
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(D)
        self.heads = nn.ModuleList(nn.Linear(D, V, bias=False) for _ in range(0 if tied else num_heads))
        self.transform = transform or (lambda z: z)

    def head_weight(self) -> torch.Tensor:
        weight = self.heads[0].weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]
        past: torch.Tensor = self.norm(x + self.drop(self.mix(x.cumsum(1) / steps)).tanh())
        return past

    def logits(self, hidden: torch.Tensor, head: int = 0) -> torch.Tensor:
        z = self.heads[head](hidden) if len(self.heads) else functional.linear(hidden, self.embed.weight)
        return self.transform(z)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.logits(self.hidden(input_ids))


def batch(seed: int = 0, lengths: tuple[int, ...] = (12, 9, 7)) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, V, (B, T), generator=g)
    keep = torch.arange(T)[None] < torch.tensor(lengths)[:, None]
    ids = torch.where(keep, ids, 0)
    return {"input_ids": ids, "attention_mask": keep.long(), "labels": torch.where(keep, ids, -100)}


def next_labels(b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Labels of the next token at each position, -100 at the last: [B, T]."""
    return torch.cat([b["labels"][:, 1:], torch.full((B, 1), -100)], dim=1)


def twin(
    logits_loss: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], seed: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """(targets [B, T], signed weights [B, T]) of a loss of final logits, from its definition w y = p - G with explicit logits.

    d loss / d logits = w (p - y), so w and y follow from two different float64 logits by least squares, a position at a time.
    """
    g = torch.Generator().manual_seed(seed)
    pulls, probabilities = [], []
    for size in (0.0, 1.0):
        z = (size * torch.randn(shape, generator=g, dtype=torch.float64)).requires_grad_()
        (pull,) = torch.autograd.grad(logits_loss(z), z)
        pulls.append(pull)
        probabilities.append(z.detach().softmax(-1))
    change, moved = probabilities[1] - probabilities[0], pulls[1] - pulls[0]
    weight = (moved * change).sum(-1) / (change * change).sum(-1)
    target = (-pulls[0] * weight.sign()[..., None]).argmax(-1)
    return torch.where(weight.abs() > 1e-12, target, -1), weight


def setup_of(model: nn.Module, b: dict[str, Any], loss_fn: Any, **more: Any) -> dict[str, Any]:
    return {"model": model, "batch": b, "loss_fn": loss_fn, **more}
