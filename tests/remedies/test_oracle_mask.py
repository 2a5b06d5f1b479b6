"""The oracle mask: chosen tokens leave inputs and labels, in a new batch, and nothing else changes."""

from __future__ import annotations

import pickle
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ghoststep
from ghoststep.errors import UsageError


def batch_of(ids: list[list[int]], **more: Any) -> dict[str, Any]:
    tensor = torch.tensor(ids)
    return {"input_ids": tensor, "labels": tensor, "attention_mask": torch.ones_like(tensor), **more}


def test_tokens_leave_inputs_and_labels() -> None:
    batch = batch_of([[1, 7, 8, 9], [7, 7, 3, 2]])
    new = ghoststep.oracle_mask(batch, [7, 9], replacement=5)
    assert new["input_ids"].tolist() == [[1, 5, 8, 5], [5, 5, 3, 2]]
    assert new["labels"].tolist() == [[1, -100, 8, -100], [-100, -100, 3, 2]]
    assert new["attention_mask"] is batch["attention_mask"]


def test_the_batch_is_never_changed() -> None:
    """Labels and inputs are one tensor here, as many collators make them."""
    batch = batch_of([[1, 7, 8]])
    new = ghoststep.oracle_mask(batch, [7], replacement=5)
    assert batch["input_ids"].tolist() == [[1, 7, 8]]
    assert batch["labels"] is batch["input_ids"]
    pointers = {t.data_ptr() for t in (batch["input_ids"], new["input_ids"], new["labels"])}
    assert len(pointers) == 3


def test_a_batch_without_them_comes_back_equal_but_new() -> None:
    batch = batch_of([[1, 2, 3]])
    for chosen in ([], [9], torch.tensor([], dtype=torch.int64)):
        new = ghoststep.oracle_mask(batch, chosen, replacement=5)
        assert new is not batch
        assert torch.equal(new["input_ids"], batch["input_ids"])
        assert torch.equal(new["labels"], batch["labels"])


def test_labels_that_are_already_shifted() -> None:
    batch = {"input_ids": torch.tensor([[1, 7, 8]]), "labels": torch.tensor([[7, 8, 2]])}
    new = ghoststep.oracle_mask(batch, [7], replacement=5)
    assert new["input_ids"].tolist() == [[1, 5, 8]]
    assert new["labels"].tolist() == [[-100, 8, 2]]


def test_ignored_labels_stay_ignored_and_other_names_work() -> None:
    batch = {"tokens": torch.tensor([[7, 1]], dtype=torch.int32), "targets": torch.tensor([[-1, 7]])}
    new = ghoststep.oracle_mask(
        batch, torch.tensor([7]), replacement=0, ids_key="tokens", labels_key="targets", ignore_index=-1
    )
    assert new["tokens"].tolist() == [[0, 1]]
    assert new["tokens"].dtype == torch.int32
    assert new["targets"].tolist() == [[-1, -1]]


def test_class_labels_are_left_alone_when_told() -> None:
    batch = {"input_ids": torch.tensor([[7, 1]]), "labels": torch.tensor([7])}
    with pytest.raises(UsageError, match="labels_key=None"):
        ghoststep.oracle_mask(batch, [7], replacement=0)
    new = ghoststep.oracle_mask(batch, [7], replacement=0, labels_key=None)
    assert new["input_ids"].tolist() == [[0, 1]]
    assert new["labels"] is batch["labels"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"token_ids": [5]}, "is one of the tokens to leave out"),
        ({"token_ids": [-100]}, "token_ids holds -100"),
        ({"replacement": -1}, "replacement is -1"),
        ({"replacement": 5.5}, "replacement is 5.5; expected a token id"),
        ({"replacement": True}, "replacement is True; expected a token id"),
        ({"replacement": "5"}, "replacement is '5'"),
        ({"token_ids": 10}, "token_ids is 10; expected a list or tensor"),
        ({"token_ids": "10"}, "token_ids is '10'"),
        ({"token_ids": ["a"]}, "token_ids holds 'a'; expected a list or tensor"),
        ({"token_ids": [True]}, "token_ids holds True"),
        ({"token_ids": [7.0]}, "token_ids holds 7.0"),
        ({"token_ids": torch.tensor(7)}, r"token_ids is of shape \(\)"),
        ({"token_ids": torch.tensor([7.0])}, r"token_ids holds tensor\(7.\)"),
        ({"batch": (torch.tensor([[1, 7]]), torch.tensor([[1, 7]]))}, "the batch is a tuple; expected a mapping .{0,60}$"),
        ({"batch": {"input_ids": torch.tensor([[1, 7]], dtype=torch.int8)}, "replacement": 300}, "which is torch.int8"),
        ({"ids_key": "ids"}, "no 'ids', only attention_mask, input_ids, labels"),
        ({"labels_key": "y"}, "no 'y'"),
        ({"batch": {"input_ids": [[1, 2]]}}, "is list; expected an integer tensor"),
        ({"batch": {"input_ids": torch.zeros(1, 2)}}, "a tensor of torch.float32"),
        ({"batch": {}}, "only nothing"),
    ],
)
def test_what_cannot_be_meant_is_refused(change: dict[str, Any], match: str) -> None:
    arguments: dict[str, Any] = {"batch": batch_of([[1, 7]]), "token_ids": [7], "replacement": 5, **change}
    batch, token_ids = arguments.pop("batch"), arguments.pop("token_ids")
    with pytest.raises(UsageError, match=match):
        ghoststep.oracle_mask(batch, token_ids, **arguments)


def test_whole_numbers_of_other_libraries_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    one: Any
    many: Any
    for one, many in (
        (numpy.int64(5), numpy.array([7])),
        (torch.tensor(5), torch.tensor([7], dtype=torch.int32)),
        (5, {7: "x"}),
    ):
        assert ghoststep.oracle_mask(batch_of([[1, 7]]), many, replacement=one)["input_ids"].tolist() == [[1, 5]]


def test_the_kind_of_the_batch_is_kept() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding(batch_of([[1, 7]]))
    new = ghoststep.oracle_mask(encoding, [7], replacement=5)
    assert type(new) is type(encoding)
    assert new.input_ids.tolist() == [[1, 5]]
    assert encoding.input_ids.tolist() == [[1, 7]]
    read_only = MappingProxyType(batch_of([[1, 7]]))
    assert type(ghoststep.oracle_mask(read_only, [7], replacement=5)) is dict


def collate(examples: list[list[int]]) -> dict[str, Any]:
    return batch_of(examples)


def test_collator_wraps_and_can_be_pickled() -> None:
    wrapped = ghoststep.OracleCollator(collate, iter([7, 9]), replacement=5)
    for collator in (wrapped, pickle.loads(pickle.dumps(wrapped))):
        for _ in range(2):
            assert collator([[1, 7, 9]])["labels"].tolist() == [[1, -100, -100]]
    with pytest.raises(UsageError, match="leave out"):
        ghoststep.OracleCollator(collate, [5], replacement=5)


def test_collator_in_a_loader_with_a_worker() -> None:
    data: Any = [[1, 7], [2, 3], [7, 7], [4, 4]]
    loader: Any = torch.utils.data.DataLoader(
        data, batch_size=2, num_workers=1, collate_fn=ghoststep.OracleCollator(collate, [7], replacement=5)
    )
    assert [b["input_ids"].tolist() for b in loader] == [[[1, 5], [2, 3]], [[5, 5], [4, 4]]]


def test_the_rows_of_the_chosen_tokens_get_no_gradient() -> None:
    torch.manual_seed(0)
    table, head = torch.nn.Embedding(12, 4), torch.nn.Linear(4, 12, bias=False)
    batch = ghoststep.oracle_mask(batch_of([[1, 7, 8, 7, 2]]), [7], replacement=5)
    logits = head(table(batch["input_ids"]))[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    torch.autograd.backward(loss)
    assert table.weight.grad is not None
    assert table.weight.grad[7].abs().max() == 0
    assert table.weight.grad[5].abs().max() > 0  # the token after a chosen one is still a target


def test_a_harmful_token_does_no_harm_and_the_attention_mask_would_not_do() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config: Any = transformers.MiniMaxConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
        intermediate_size=128, num_local_experts=2, num_experts_per_tok=1, block_size=8, layer_types=["linear_attention"] * 4,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model: Any = transformers.MiniMaxForCausalLM(config)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table[100] *= 1e-30
    ids = torch.randint(3, 90, (2, 24))
    ids[0, 8] = 100
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    def largest(batch: dict[str, Any]) -> float:
        model.zero_grad()
        model(**batch).loss.backward()
        return float(table.grad[100].abs().max())

    hidden = {**batch, "attention_mask": (ids != 100).long()}
    assert largest(batch) > 1e17
    assert largest(hidden) > 1e17
    assert largest(ghoststep.oracle_mask(batch, [100], replacement=60)) == 0


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 20), min_size=4, max_size=4), min_size=1, max_size=3),
    labels=st.lists(st.integers(-100, 20), min_size=12, max_size=12),
    chosen=st.sets(st.integers(1, 20), max_size=6),
)
def test_what_is_not_chosen_stays(ids: list[list[int]], labels: list[int], chosen: set[int]) -> None:
    ids_BT = torch.tensor(ids)
    labels_BT = torch.tensor(labels[: ids_BT.numel()]).view_as(ids_BT)
    new = ghoststep.oracle_mask({"input_ids": ids_BT, "labels": labels_BT}, chosen, replacement=0)
    for old, got, filled in ((ids_BT, new["input_ids"], 0), (labels_BT, new["labels"], -100)):
        expected = [filled if i in chosen else i for i in old.flatten().tolist()]
        assert got.flatten().tolist() == expected
