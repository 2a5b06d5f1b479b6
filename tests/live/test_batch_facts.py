"""What a batch declares: padding, documents, ids; each source, its priority, and the look-alikes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ghoststep.errors import CannotLook
from ghoststep.evidence.batch import BatchFacts
from ghoststep.instruments.live.batch_documents import announced_documents
from ghoststep.instruments.live.batch_facts import batch_facts
from ghoststep.instruments.live.calling import live_call
from ghoststep.subjects.setup import make_setup
from tests.live.xray_models import Tiny, V

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [5, 9, 8, 3, 0, 0, 0, 0]])
MASK = torch.tensor([[1] * 8, [1] * 4 + [0] * 4])


def loss(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
    mean: torch.Tensor = m(b["input_ids"]).mean()
    return mean


def facts(given: dict[str, Any], **more: Any) -> BatchFacts:
    setup = make_setup({"model": Tiny(), "batch": given, "loss_fn": loss, **more})
    found = batch_facts.function(setup, live_call.function(setup))
    assert isinstance(found, BatchFacts)
    return found


def padding(found: BatchFacts) -> list[list[bool]]:
    assert found.padding_BT is not None
    return [[bool(p) for p in row] for row in found.padding_BT]


class TestPadding:
    def test_the_attention_mask_comes_first(self) -> None:
        found = facts({"input_ids": IDS, "attention_mask": MASK}, pad_token_id=12)
        assert padding(found) == (MASK == 0).tolist()
        assert (found.padding_source, found.sides) == ("attention_mask", "right")

    def test_runs_of_the_pad_id_without_a_mask(self) -> None:
        found = facts({"input_ids": IDS}, pad_token_id=0)
        assert padding(found) == (MASK == 0).tolist()
        assert found.padding_source == "pad_token_id 0"

    def test_a_mask_that_says_what_is_left_out(self) -> None:
        assert padding(facts({"input_ids": IDS, "key_padding_mask": MASK == 0})) == (MASK == 0).tolist()

    def test_left_padding_and_both_sides(self) -> None:
        left = IDS.flip(1)
        assert facts({"input_ids": left, "attention_mask": MASK.flip(1)}).sides == "left"
        both = torch.tensor([[0, 5, 6, 7, 0, 0], [5, 6, 7, 8, 9, 4]])
        assert facts({"input_ids": both}, pad_token_id=0).sides == "both"

    def test_the_pad_id_inside_a_text_is_text(self) -> None:
        ids = torch.tensor([[5, 0, 6, 7, 8, 9], [5, 6, 0, 0, 7, 8]])
        assert not facts({"input_ids": ids}, pad_token_id=0).padding_BT.any()  # type: ignore[union-attr]

    def test_the_first_end_token_is_the_texts_own(self) -> None:
        class Words:
            eos_token_id = pad_token_id = 2
            all_special_ids = (2,)

        ids = torch.tensor([[5, 6, 7, 2, 2, 2], [5, 6, 7, 8, 9, 2]])
        found = facts({"input_ids": ids}, tokenizer=Words())
        assert padding(found) == [[False] * 4 + [True] * 2, [False] * 6]

    def test_a_single_supervised_pad_id_at_the_end_is_text(self) -> None:
        ids = torch.tensor([[5, 6, 7, 8, 9, 0]])
        assert not facts({"input_ids": ids, "labels": ids}, pad_token_id=0).padding_BT.any()  # type: ignore[union-attr]
        ignored = ids.masked_fill(ids == 0, -100)
        assert facts({"input_ids": ids, "labels": ignored}, pad_token_id=0).padding_BT.any()  # type: ignore[union-attr]

    def test_nothing_says_so(self) -> None:
        found = facts({"input_ids": IDS})
        assert found.padding_BT is None
        assert "no attention_mask and no pad_token_id" in found.padding_source


class TestDocuments:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    numbers = ((0, 0, 0, 1, 1, 2, 2, 2),)
    ids = torch.arange(4, 12)[None]

    def numbered(self, **entries: torch.Tensor) -> Any:
        found, _ = announced_documents(entries, self.ids)
        return None if found is None else tuple(tuple(row) for row in found.tolist())

    def test_every_way_to_announce(self) -> None:
        number = torch.tensor(self.numbers)
        square = (number[:, :, None] == number[:, None]) & torch.ones(8, 8).bool().tril()
        additive = torch.where(square, 0.0, -1e9)[:, None]
        assert self.numbered(position_ids=self.positions) == self.numbers
        assert self.numbered(seq_idx=number + 4) == self.numbers
        assert self.numbered(cu_seqlens=torch.tensor([0, 3, 5, 8])) == self.numbers
        assert self.numbered(attention_mask=number + 1) == self.numbers
        assert self.numbered(attention_mask=square[:, None]) == self.numbers
        assert self.numbered(attention_mask=additive) == self.numbers
        assert self.numbered(position_ids=self.positions, attention_mask=torch.ones(1, 8)) == self.numbers

    def test_left_padding_is_no_boundary(self) -> None:
        left = torch.tensor([[1, 1, 1, 0, 1, 2, 3, 4]])
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
        assert self.numbered(position_ids=left, attention_mask=mask) == ((0,) * 8,)
        assert self.numbered(position_ids=left) == ((0,) * 8,)

    def test_one_document_or_nothing_announced(self) -> None:
        assert self.numbered() is None
        assert self.numbered(token_type_ids=torch.tensor(self.numbers)) is None
        causal = torch.ones(1, 1, 8, 8).bool().tril()
        assert self.numbered(attention_mask=causal) == ((0,) * 8,)
        found = facts({"input_ids": IDS, "position_ids": torch.arange(8).expand(2, -1)})
        assert found.document_BT is None

    def test_through_the_instrument(self) -> None:
        found = facts({"input_ids": self.ids, "position_ids": self.positions})
        assert found.document_BT is not None
        assert found.document_BT.tolist() == [list(self.numbers[0])]
        assert found.has_position_ids


def test_two_calls_of_the_model_stand_below_one_another() -> None:
    def pair(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        difference: torch.Tensor = m(b["chosen"]).mean() - m(b["rejected"]).mean()
        return difference

    found = facts({"chosen": IDS, "rejected": IDS[:, :5]}, loss_fn=pair)
    assert found.ids_BT.shape == (4, 8)
    assert found.ids_BT[2].tolist() == [5, 6, 7, 8, 9, -1, -1, -1]


def test_labels_counts_and_roles() -> None:
    labels = IDS.masked_fill(MASK == 0, -100)
    roles = torch.ones_like(IDS)
    batches = [{"input_ids": IDS, "labels": labels}, {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}]
    found = facts(batches[0], batches=batches, token_roles=roles)
    assert found.supervised_per_batch == (12, 0)
    assert found.labels_BT is not None
    assert found.labels_BT.tolist() == labels.tolist()
    assert found.roles_BT is not None
    with pytest.raises(CannotLook, match="token_roles has shape"):
        facts(batches[0], token_roles=roles[:, :3])


def test_a_model_without_ids_is_unknown() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, V)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(inputs)
            return out

    setup = make_setup(
        {"model": Takes(), "batch": {"inputs": torch.randn(2, 3, 4)}, "loss_fn": lambda m, b: m(b["inputs"]).mean()}
    )
    with pytest.raises(CannotLook, match="no token ids"):
        batch_facts.function(setup, live_call.function(setup))
