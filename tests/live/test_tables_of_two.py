"""Which of several look-ups is that of the tokens: two tables of one size, segments, prompts that count up, time first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghoststep.evidence.batch import BatchFacts
from ghoststep.instruments.live.batch_facts import batch_facts
from ghoststep.instruments.live.calling import LiveCall, is_varied, live_call
from ghoststep.subjects.setup import Setup, make_setup

V, D = 40, 16


def called(setup: Setup) -> LiveCall:
    found = live_call.function(setup)
    assert isinstance(found, LiveCall)
    return found


def facts(setup: Setup) -> BatchFacts:
    found = batch_facts.function(setup, called(setup))
    assert isinstance(found, BatchFacts)
    return found


def words(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, V, shape, generator=torch.Generator().manual_seed(seed))


class TwoTables(nn.Module):
    """An encoder and a decoder with a table each, `shared` or not; the head stands over the decoder's positions."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.source = nn.Embedding(V, D)
        self.target = nn.Embedding(V, D)
        if shared:
            self.target.weight = self.source.weight
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        seen = self.source(input_ids).mean(1, keepdim=True)
        logits: torch.Tensor = self.head(self.target(decoder_input_ids) + seen)
        return logits


def decoder_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"], batch["decoder_input_ids"])
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["decoder_input_ids"][:, 1:].flatten())


@pytest.mark.parametrize("longer", ["input_ids", "decoder_input_ids"])
@pytest.mark.parametrize("shared", [True, False])
def test_the_decoders_look_up_is_the_last(shared: bool, longer: str) -> None:
    lengths = {"input_ids": 9, "decoder_input_ids": 9, longer: 14}
    batch = {name: words(3, length, seed=length) for name, length in lengths.items()}
    call = called(make_setup({"model": TwoTables(shared=shared), "batch": batch, "loss_fn": decoder_loss}))
    assert torch.equal(call.ids[-1], batch["decoder_input_ids"])
    assert call.head_name == "head"
    if not shared:
        assert call.embedding_name == "target"
        assert len(call.ids) == 1


class Segmented(nn.Module):
    """Tokens and segments; `prompts` rows of the token table stand in front, and the head knows none of them."""

    def __init__(self, *, segments: int, prompts: int = 0, first: bool = False) -> None:
        super().__init__()
        self.prompts, self.first = prompts, first
        self.words, self.segments = nn.Embedding(V + prompts, D), nn.Embedding(segments, D)
        self.mix, self.head = nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        front = torch.arange(V, V + self.prompts).expand(len(input_ids), -1)
        ids = torch.cat([front, input_ids], 1)
        kinds = torch.cat([torch.zeros_like(front), torch.full_like(input_ids, 2)], 1)
        looked = [self.segments(kinds), self.words(ids)] if self.first else [self.words(ids), self.segments(kinds)]
        logits: torch.Tensor = self.head(self.mix(looked[0] + looked[1])[:, self.prompts :])
        return logits


def own_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"])
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("segments", "prompts"),
    [
        (3, 0),
        (2 * V, 0),
        (V, 0),
        (D, 0),
        (D, 30),
        (2 * V, 30),
    ],  # 2 V: more kinds than words; D: as many as the hidden state has
)
def test_segments_are_no_tokens(segments: int, prompts: int, first: bool) -> None:
    model = Segmented(segments=segments, prompts=prompts, first=first)
    call = called(make_setup({"model": model, "batch": {"input_ids": words(4, 12)}, "loss_fn": own_loss}))
    assert call.embedding_name == "words"
    assert call.ids[0].shape == (4, 12 + prompts)


def test_what_counts_as_tokens() -> None:
    assert is_varied(words(2, 9))
    assert not is_varied(torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]))
    assert not is_varied(torch.arange(9).expand(3, -1))
    assert is_varied(torch.tensor([5]))  # a single one tells nothing


class Turning(nn.Module):
    """Exchanges batch and time before the look-up, and back before the head if `back`."""

    def __init__(self, *, back: bool) -> None:
        super().__init__()
        self.words, self.head, self.back = nn.Embedding(V, D), nn.Linear(D, V), back

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(input_ids.T)
        logits: torch.Tensor = self.head(hidden.transpose(0, 1) if self.back else hidden)
        return logits if self.back else logits.transpose(0, 1)


@pytest.mark.parametrize("back", [True, False])
def test_a_model_that_turns_inside_is_read_as_it_is_called(back: bool) -> None:
    ids = words(3, 8)
    setup = make_setup({"model": Turning(back=back), "batch": {"input_ids": ids}, "loss_fn": own_loss, "token_roles": ids % 2})
    found = facts(setup)
    expected = ids if back else ids.T
    assert found.ids_BT.tolist() == expected.tolist()
    assert found.roles_BT is not None
    assert found.roles_BT.tolist() == (expected % 2).tolist()


def test_tokens_of_the_models_own_in_front_have_no_role() -> None:
    ids = words(4, 12)
    setup = make_setup(
        {"model": Segmented(segments=3, prompts=5), "batch": {"input_ids": ids}, "loss_fn": own_loss, "token_roles": ids % 2}
    )
    found = facts(setup)
    assert found.roles_BT is not None
    assert found.roles_BT[:, :5].tolist() == [[-1] * 5] * 4
    assert found.roles_BT[:, 5:].tolist() == (ids % 2).tolist()
