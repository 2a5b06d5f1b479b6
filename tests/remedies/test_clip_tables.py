"""Tables of every kind: bags, sparse, tied, padded, behind a model's own getter; and a fused run to the optimizer's step."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import nn

from ghoststep import clip_grad_norm_
from ghoststep.remedies.clip_events import ClipEvent, listening
from ghoststep.remedies.clip_tables import named_tables, tables_among
from tests.remedies.clip_models import exact_norm, fill, grad_of, grads, on_device, small, table_of

torch.set_num_threads(1)


@pytest.mark.parametrize("as_list", [False, True])
def test_an_embedding_bag(as_list: bool) -> None:
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(30, 8, mode="mean"), "head": nn.Linear(8, 2)})
    bag, head = model["bag"], model["head"]
    head(bag(torch.tensor([1, 2, 2, 5, 7]), torch.tensor([0, 3]))).sum().backward()
    bag.weight.grad[2] *= 1e26  # type: ignore[index, operator]
    kept = bag.weight.grad[5].clone()  # type: ignore[index]
    heard: list[ClipEvent] = []
    with listening(heard.append):
        assert math.isfinite(float(clip_grad_norm_(list(model.parameters()) if as_list else model, 1.0)))
    assert heard[0].rows[0].table_row == 2
    assert heard[0].rows[0].table == ("parameters[0]" if as_list else "bag.weight")
    assert bag.weight.grad[2].norm() > 0.1  # type: ignore[index]
    assert bag.weight.grad[5].norm() > 0.1 * kept.norm()  # type: ignore[index]


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("mode", ["row", "group", "global"])
def test_a_sparse_table_is_coalesced_and_clipped_like_its_dense_twin(mode: str, as_list: bool) -> None:
    """The same row twice in a batch: the duplicates add up before anything is measured."""
    ids = torch.tensor([4, 4, 9, 17, 4])
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(30, 8, sparse=sparse), nn.Linear(8, 2))
        model(ids).square().sum().backward()
        grad = table_of(model)
        scale = torch.ones(30, 1).index_fill(0, torch.tensor([9]), 1e25)
        model[0].weight.grad = (
            torch.sparse_coo_tensor(grad._indices(), grad._values() * scale[grad._indices()[0]], grad.shape)
            if sparse
            else grad * scale
        )
        assert not sparse or not table_of(model).is_coalesced()
        norm = clip_grad_norm_(list(model.parameters()) if as_list else model, 1.0, mode)
        grad = table_of(model)
        found.append((float(norm), grad.to_dense() if sparse else grad, grad_of(model, "1.weight")))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for a, b in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(a, b)


def test_a_healthy_sparse_table_is_clipped_like_its_dense_twin() -> None:
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(30, 8, sparse=sparse), nn.Linear(8, 2))
        model(torch.tensor([4, 4, 9])).square().sum().backward()
        found.append(
            (clip_grad_norm_(model, 0.1), table_of(model).to_dense() if sparse else table_of(model), grad_of(model, "1.weight"))
        )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


class Tied(nn.Module):
    """One tensor as table and head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.table.weight


def test_a_tied_table_counts_once() -> None:
    model = Tied()
    fill(model, 0.01)
    model.table.weight.grad[3] *= 1e26  # type: ignore[index]
    true = exact_norm(grads(model.parameters()))
    kept = model.table.weight.grad[5].clone()  # type: ignore[index]
    given: list[Any] = [model.table.weight, model.head.weight]
    assert float(clip_grad_norm_(given, 1.0)) == pytest.approx(true, rel=1e-5)
    assert model.table.weight.grad[3].norm() == pytest.approx(1, rel=0.1)  # type: ignore[index]
    assert model.table.weight.grad[5].norm() > 0.3 * kept.norm()  # type: ignore[index]


def test_padding_idx_stays_without_gradient() -> None:
    model = nn.Sequential(nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 3))
    model(torch.tensor([0, 0, 4, 5])).sum().backward()
    table_of(model)[4] *= 1e26
    for _ in range(2):
        clip_grad_norm_(model, 1.0)
    assert (table_of(model)[0] == 0).all()
    assert table_of(model)[5].norm() > 0


def test_a_gradient_that_is_not_contiguous() -> None:
    model = small()
    fill(model, 0.01)
    table = table_of(model)
    table[3] *= 1e27
    model[0].weight.grad = table.t().contiguous().t()
    assert math.isfinite(float(clip_grad_norm_(model, 1.0)))
    assert 0.1 < table_of(model)[3].norm() <= 1


class Own(nn.Module):
    """A table that is no nn.Embedding, known by the model's getter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Linear(8, 20, bias=False)
        self.rest = nn.Linear(8, 8)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens


class Refusing(Own):
    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


def test_a_table_of_another_class_is_found_through_the_getter() -> None:
    assert list(named_tables(Own()).values()) == ["tokens.weight"]
    assert named_tables(Refusing()) == {}


def test_tables_in_a_bare_list_are_those_of_living_modules() -> None:
    model, stranger = small(), nn.Parameter(torch.zeros(50, 16))
    parameters = [*model.parameters(), stranger]
    assert tables_among(parameters) == {id(model[0].weight): "parameters[0]"}
    weights = list(model.parameters())
    del model, parameters
    gc.collect()
    assert list(tables_among(weights).values()) == ["parameters[0]"]  # remembered


@pytest.mark.parametrize("route", ["host", "device"])
def test_no_table_at_all(route: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fill(model, 1e25)
    norm = on_device(model, 1.0) if route == "device" else clip_grad_norm_(model, 1.0)
    assert math.isfinite(float(norm))
    assert exact_norm(grads(model.parameters())) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_under_a_gradient_scaler(kind: torch.dtype) -> None:
    """After `unscale_`; a spike is clipped and the step taken, a true overflow is the scaler's to skip."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with torch.autocast("cpu", dtype=kind):
        loss = model(torch.tensor([3, 4, 5])).float().square().mean()
    scaler.scale(loss).backward()
    table_of(model)[3] = 1e25
    before = model[1].weight.detach().clone()  # type: ignore[operator]
    scaler.unscale_(optimizer)
    assert math.isfinite(float(clip_grad_norm_(model, 1.0)))
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model[1].weight)  # type: ignore[arg-type]
    assert scaler.get_scale() == 1024


def test_once_a_step_under_accumulation() -> None:
    """Three healthy micro-batches and one spike: the healthy three still move the trunk as much as they would alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 2))
    for ids in ([1, 2], [3, 4], [5, 6], [7, 8]):
        (model(torch.tensor(ids)).square().mean() / 4).backward()
    healthy = grad_of(model, "1.weight").clone()
    table_of(model)[7] = 1e25
    clip_grad_norm_(model, 1.0)
    assert grad_of(model, "1.weight").norm() > 0.3 * healthy.norm()
