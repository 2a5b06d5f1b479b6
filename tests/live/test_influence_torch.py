"""A third family: `nn.TransformerEncoder` as people use it, batch first or time first, with its two kinds of masks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghoststep.finding import Outcome
from tests.live.influence_models import D, V, bad, lm_batch, seeded, verdicts


class Encoder(nn.Module):
    """batch_first False turns the ids round inside; `polarity` passes the padding mask the wrong way round."""

    def __init__(self, *, causal: bool = True, batch_first: bool = True, polarity: bool = False) -> None:
        super().__init__()
        self.embed, self.pos, self.head = nn.Embedding(V, D), nn.Embedding(64, D), nn.Linear(D, V)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer = nn.TransformerEncoderLayer(D, 4, 48, batch_first=batch_first, dropout=0.1)
            self.encoder = nn.TransformerEncoder(layer, 2)
        self.causal, self.batch_first, self.polarity = causal, batch_first, polarity

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        ids = input_ids if self.batch_first else input_ids.T
        time = ids.shape[1] if self.batch_first else ids.shape[0]
        places = self.pos(torch.arange(time))
        x = self.embed(ids) + (places if self.batch_first else places[:, None])
        ignored = None if attention_mask is None else attention_mask.bool() == self.polarity
        hidden = torch.triu(torch.ones(time, time, dtype=torch.bool), 1) if self.causal else None
        logits: torch.Tensor = self.head(self.encoder(x, mask=hidden, src_key_padding_mask=ignored))
        return logits if self.batch_first else logits.transpose(0, 1)


class TimeFirst(Encoder):
    """Takes ids [T, B] and gives logits [T, B, V]."""

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(ids.T).transpose(0, 1)


def next_token(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"])
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def next_token_time_first(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch["src"])[:-1].flatten(0, 1), batch["src"][1:].flatten())


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_encoder_as_language_model(causal: bool, batch_first: bool, train: bool) -> None:
    model = seeded(lambda: Encoder(causal=causal, batch_first=batch_first), train=train)
    found = verdicts(model, lm_batch(), loss_fn=next_token)
    assert bad(found) == (set() if causal else {"GS101"}), {c: found[c].findings for c in bad(found)}
    if causal:
        assert found["GS101"].outcome is Outcome.CLEAR
        assert found["GS105"].outcome is Outcome.CLEAR


@pytest.mark.parametrize("causal", [True, False])
def test_ids_given_time_first(causal: bool) -> None:
    batch = {"src": lm_batch(examples=5)["input_ids"].T.contiguous().clamp(min=3)}
    found = verdicts(seeded(lambda: TimeFirst(causal=causal, batch_first=False)), batch, loss_fn=next_token_time_first)
    assert bad(found) == (set() if causal else {"GS101"}), {c: found[c].findings for c in bad(found)}
    if causal:
        assert found["GS101"].outcome is Outcome.CLEAR


@pytest.mark.parametrize("train", [True, False])
def test_a_padding_mask_the_wrong_way_round(train: bool) -> None:
    found = verdicts(seeded(lambda: Encoder(polarity=True), train=train), lm_batch(), loss_fn=next_token)
    assert bad(found) & {"GS103", "GS107"}


def test_the_fast_path_is_put_back() -> None:
    assert torch.backends.mha.get_fastpath_enabled()
    verdicts(seeded(Encoder, train=False), lm_batch(), loss_fn=next_token)
    assert torch.backends.mha.get_fastpath_enabled()
