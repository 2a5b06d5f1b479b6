"""Masks and layers for `TinyLM`: faults that are in use, and healthy ones that look like them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.live.influence_models import D, Mask, Output, V, right, triangle

Maybe = torch.Tensor | None


def no_causal(ids: torch.Tensor, keep: Maybe, _: Maybe) -> torch.Tensor:
    assert keep is not None
    return (keep.bool()[:, None, None, :] | torch.eye(ids.shape[1]).bool()).expand(len(ids), 1, ids.shape[1], -1)


def causal_only_without_padding_mask(ids: torch.Tensor, keep: Maybe, at: Maybe) -> torch.Tensor | None:
    """The case b_mask_drops_causality: the causal part goes as soon as a padding mask comes."""
    return None if keep is None else no_causal(ids, keep, at)


def inverted(ids: torch.Tensor, keep: Maybe, _: Maybe) -> torch.Tensor:
    return ~triangle(ids.shape[1]).expand(len(ids), 1, -1, -1)


def keys_inverted(ids: torch.Tensor, keep: Maybe, _: Maybe) -> torch.Tensor:
    assert keep is not None
    return triangle(ids.shape[1]) & ~keep.bool()[:, None, None, :]


def keys_inverted_but_self(ids: torch.Tensor, keep: Maybe, at: Maybe) -> torch.Tensor:
    return keys_inverted(ids, keep, at) | torch.eye(ids.shape[1]).bool()


def over_queries(ids: torch.Tensor, keep: Maybe, _: Maybe) -> torch.Tensor:
    assert keep is not None
    return (triangle(ids.shape[1])[None, None] & keep.bool()[:, None, :, None]) | torch.eye(ids.shape[1]).bool()


def added_ones(ids: torch.Tensor, keep: Maybe, _: Maybe) -> torch.Tensor:
    """An additive mask of 0 and 1 for padding: PAD becomes more visible, not less."""
    assert keep is not None
    return torch.where(triangle(ids.shape[1]), 0.0, -1e9)[None, None] + (1 - keep.float())[:, None, None, :]


def causal_only(ids: torch.Tensor, keep: Maybe, _: Maybe) -> torch.Tensor:
    return triangle(ids.shape[1]).expand(len(ids), 1, -1, -1)


def soft(value: float) -> Mask:
    return lambda ids, keep, at: torch.where(right(ids, keep, at), 0.0, value)


def leaky_chunks(size: int) -> Mask:
    def mask(ids: torch.Tensor, keep: Maybe, at: Maybe) -> torch.Tensor:
        chunk = torch.arange(ids.shape[1]) // size
        visible = right(ids, keep, at) | (chunk[:, None] == chunk)
        return visible if keep is None else visible & (keep.bool()[:, None, None, :] | torch.eye(ids.shape[1]).bool())

    return mask


def one_leaky_pair(ids: torch.Tensor, keep: Maybe, at: Maybe) -> torch.Tensor:
    mask = right(ids, keep, at).clone()
    mask[:, :, 7, 8] = True
    return mask


def window(ids: torch.Tensor, keep: Maybe, at: Maybe) -> torch.Tensor:
    index = torch.arange(ids.shape[1])
    return right(ids, keep, at) & ((index[:, None] - index) < 4)


def chunks(ids: torch.Tensor, keep: Maybe, at: Maybe) -> torch.Tensor:
    chunk = torch.arange(ids.shape[1]) // 4
    return right(ids, keep, at) & (chunk[:, None] == chunk)


def packs(ids: torch.Tensor, keep: Maybe, at: Maybe) -> torch.Tensor:
    assert at is not None
    document = (at == 0).cumsum(1)
    return right(ids, None, at) & (document[:, :, None] == document[:, None, :])[:, None]


def empty_line(ids: torch.Tensor, keep: Maybe, at: Maybe) -> torch.Tensor:
    mask = right(ids, keep, at).clone()
    mask[:, :, 5] = False
    return mask


def empty_line_finite(ids: torch.Tensor, keep: Maybe, at: Maybe) -> torch.Tensor:
    return torch.where(empty_line(ids, keep, at), 0.0, torch.finfo(torch.float).min)


def prefix(ids: torch.Tensor, keep: Maybe, at: Maybe) -> torch.Tensor:
    mask = right(ids, keep, at).clone()
    mask[:, :, :5, :5] = True
    return mask


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class MixedUpReshape(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * x.transpose(0, 1).reshape(x.shape)


class Shift(nn.Module):
    """Adds a little of the next position, always or in train mode only."""

    def __init__(self, strength: float, *, train_only: bool = False) -> None:
        super().__init__()
        self.strength, self.train_only = strength, train_only

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.strength * x.roll(-1, 1) if self.training or not self.train_only else x


class Capacity(nn.Module):
    """Two experts that serve a quarter of the tokens each: in order, or the last ones first (which leaks the future)."""

    def __init__(self, *, last_first: bool, per_example: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, 2, bias=False), nn.Linear(D, D)
        self.last_first, self.per_example = last_first, per_example

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        flat = x.reshape(-1, D)
        expert = self.gate(flat).argmax(-1)
        kept = torch.zeros(len(flat), dtype=torch.bool)
        groups = torch.arange(b * t).view(b, t) if self.per_example else torch.arange(b * t).view(1, -1)
        for group in groups.flip(1) if self.last_first else groups:
            for j in range(2):
                kept[group[expert[group] == j][: groups.shape[1] // 4]] = True
        return x + (self.up(flat) * kept[:, None]).view(x.shape)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A GRU that ignores the mask; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True), nn.Linear(D, V)

    def forward(self, input_ids: torch.Tensor, attention_mask: Maybe = None, labels: Maybe = None) -> Output:
        logits = self.head(self.rnn(self.embed(input_ids))[0])
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1), ignore_index=-100)
        return Output(logits=logits, loss=loss)
