"""Plain PyTorch models: a small transformer that returns a tensor, a tuple or a dict, and sentence encoders.

Shapes: B examples, T positions, D features, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

MaskTransform = Callable[[Tensor, bool], Tensor]
HIDDEN = torch.finfo(torch.float32).min


def keep(bias: Tensor, training: bool) -> Tensor:
    """The mask as it was made: the healthy twin of every other transform."""
    del training
    return bias


def visible_bias(
    causal: bool, attention_mask: Tensor | None, documents: Tensor | None, B: int, T: int, prefix: Tensor | None = None
) -> Tensor:
    """Additive mask [B, 1, T, T]: 0 where a key may be seen, the smallest float32 where not. Everything sees the prefix [B, T]."""
    visible = torch.ones(B, 1, T, T, dtype=torch.bool)
    if causal:
        visible = visible.tril()
    if causal and prefix is not None:
        visible = visible | prefix[:, None, None, :]
    if attention_mask is not None:
        visible = visible & attention_mask.bool()[:, None, None, :]
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    return torch.zeros(B, 1, T, T).masked_fill(~visible, HIDDEN)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Softmax attention; a query that sees no key gets zeros, as `scaled_dot_product_attention` gives with a boolean mask."""
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    nothing = (bias <= HIDDEN / 2).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(nothing, 0.0).to(v.dtype) @ v


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.gain = 1.0
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        a = attend(q, k, v, bias, self.gain * (D // self.heads) ** -0.5)
        x = x + self.out(a.transpose(1, 2).reshape(B, T, D))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Trunk(nn.Module):
    """Embeddings with learned absolute positions and two blocks; documents are told apart by position ids that restart."""

    def __init__(self, vocab: int, *, causal: bool, dim: int = 32, layers: int = 2, heads: int = 4, length: int = 32) -> None:
        super().__init__()
        self.causal = causal
        self.transform: MaskTransform = keep
        self.isolate_documents = True
        self.prefix = 0
        self.embed, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.3)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        """Ids [B, T] to hidden states [B, T, D]."""
        B, T = ids.shape
        documents = None
        if position_ids is None:
            position_ids = torch.arange(T).expand(B, T)
        elif self.isolate_documents:
            documents = (position_ids == 0).cumsum(1)
        prefix = position_ids < self.prefix if self.prefix else None
        bias = self.transform(visible_bias(self.causal, attention_mask, documents, B, T, prefix), self.training)
        x = self.embed(ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, bias)
        y: Tensor = self.norm(x)
        return y


class PlainLM(nn.Module):
    """A decoder; `returns` is "tensor", "tuple" or "dict" (which also takes its batch as one dict)."""

    def __init__(self, vocab: int, returns: str) -> None:
        super().__init__()
        self.returns = returns
        self.trunk = Trunk(vocab, causal=True)
        self.head = nn.Linear(32, vocab, bias=False)
        nn.init.normal_(self.head.weight, std=0.2)

    def forward(self, batch: Any, attention_mask: Tensor | None = None, position_ids: Tensor | None = None) -> Any:
        """Ids, or a dict of them, to logits [B, T, V] in the declared container."""
        if isinstance(batch, Mapping):
            ids, attention_mask, position_ids = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
        else:
            ids = batch
        hidden = self.trunk(ids, attention_mask, position_ids)
        logits = self.head(hidden)
        if self.returns == "tensor":
            return logits
        return (logits, hidden) if self.returns == "tuple" else {"logits": logits, "hidden": hidden}


def mean_of(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """The mean [B, D] over real positions."""
    weight = attention_mask[..., None].to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)


def last_of(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """The hidden state [B, D] at the last real position."""
    last = (attention_mask * torch.arange(attention_mask.shape[1])).argmax(1)
    return hidden[torch.arange(len(hidden)), last]


class SentenceEncoder(nn.Module):
    """Mean-pooled (bidirectional) or last-token-pooled (causal) unit vectors [B, D]."""

    def __init__(self, vocab: int, pooling: str) -> None:
        super().__init__()
        self.pooling = pooling
        self.trunk = Trunk(vocab, causal=pooling == "last")
        self.logit_scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, T] ids and mask to [B, D]."""
        return torch.nn.functional.normalize(self.pool(self.trunk(input_ids, attention_mask), attention_mask), dim=-1)

    def pool(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """One vector an example from its real tokens."""
        return (mean_of if self.pooling == "mean" else last_of)(hidden, attention_mask)
