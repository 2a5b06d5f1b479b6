"""Both pictures of a real setup, measured and drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ghoststep.pictures import pictures_of


class Decoder(nn.Module):
    """One causal attention over 30 tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(30, 16), nn.Embedding(16, 16)
        self.mix, self.head = nn.Linear(16, 48), nn.Linear(16, 30, bias=False)
        self.is_causal = True

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        q, k, v = self.mix(x)[:, None].chunk(3, dim=-1)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)[:, 0]
        logits: torch.Tensor = self.head(x)
        return logits


class Words:
    """A tokenizer as far as pictures need one."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return f"w{ids[0]}"


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"])[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def test_a_decoder_is_drawn_as_it_is() -> None:
    batch = {"input_ids": torch.randint(0, 30, (2, 10), generator=torch.Generator().manual_seed(1))}
    given: dict[str, Any] = {"model": Decoder(), "batch": batch, "loss_fn": loss_fn, "tokenizer": Words()}
    made = pictures_of(given)
    seen = made.influence_text()
    assert "no position is seen to look at the future" in seen
    assert "│ edge of the future" in seen
    cells = [line.split(" ", 2)[-1] for line in seen.splitlines()[2:12]]
    assert all("█" in c or "▓" in c or "▒" in c or "░" in c for c in cells)
    assert "blank" not in seen, "a short example is drawn without gaps"
    ids = batch["input_ids"][0].tolist()
    strip = made.label_text()
    tokens, labels = (line.split()[1:] for line in strip.splitlines()[2:4])
    assert tokens == [f"w{i}" for i in ids]
    assert labels == [*(f"w{i}" for i in ids[1:]), "·"]
    assert "9 of 10 positions carry loss" in strip
    assert made.influence_svg().startswith("<svg ")
    assert made.label_svg(example=1).startswith("<svg ")


def test_a_leak_is_drawn_pair_by_pair() -> None:
    leaky = Decoder()
    leaky.is_causal = False
    batch = {"input_ids": torch.randint(0, 30, (2, 10), generator=torch.Generator().manual_seed(1))}
    made = pictures_of({"model": leaky, "batch": batch, "loss_fn": loss_fn})
    assert made.influence is not None
    matrix = made.influence.matrix_ST
    assert (matrix[np.tril_indices(10, k=-1)] > 1e-3).all()
    assert made.influence_text().count("X") >= 45


def test_measuring_changes_nothing() -> None:
    model = Decoder()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    pictures_of({"model": model, "batch": {"input_ids": torch.arange(10)[None].repeat(2, 1)}, "loss_fn": loss_fn})
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_what_cannot_be_measured_is_said() -> None:
    made = pictures_of({"model": Decoder()})
    assert made.influence_text().startswith("who sees whom: could not be measured (")
    assert made.label_text().startswith("what the loss trains on: could not be measured (")
    assert made.influence_svg() == made.label_svg() == ""
