"""What the test scripts train: a chain of gates without anything beside it, in which a near-zero table row blows up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn

VOCAB, BAD, EXAMPLE, POSITION = 64, 17, 1, 8


class Gates(nn.Module):
    """ids [B, T] → logits [B, T, V]. Fourteen norms of gain 1e2.5 in a row: row 17 of 1e-30 gets a gradient of about 1e28."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for _ in range(14):
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def model(row: float = 1e-30) -> Gates:
    """The same weights in every process."""
    torch.manual_seed(0)
    gates = Gates()
    with torch.no_grad():
        gates.embedding.weight[BAD] = row
    return gates


def batches(count: int, *bad_steps: int, seed: int = 1) -> Iterator[torch.Tensor]:
    """Batches [2, 16]; those of the bad steps (from 1) hold token 17 at position 8 of example 1."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, count + 1):
        ids = torch.randint(20, VOCAB, (2, 16), generator=generator)
        if step in bad_steps:
            ids[EXAMPLE, POSITION] = BAD
        yield ids


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy at the same positions: what is learnt does not matter here."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def digest(module: nn.Module) -> str:
    """All weights, bit for bit."""
    parts = [p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in module.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()
