"""Several texts in one call of the model, and layers that take another dimension for the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghoststep.engine import Case, ask
from ghoststep.finding import Outcome, Verdict

from .training_setups import registry, setup_of

B, T, V, D = 6, 12, 50, 16
WHO_SEES_WHOM = ("GS101", "GS102", "GS103", "GS104", "GS105", "GS107", "GS108")


class Tower(nn.Module):
    def __init__(self, *, masked: bool = True, batch_first: bool = True, causal: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(T, D)
        self.layer = nn.TransformerEncoderLayer(D, 2, 32, dropout=0.0, batch_first=batch_first)
        self.masked, self.causal = masked and batch_first, causal

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        hidden = self.layer(x, src_key_padding_mask=~mask.bool() if self.masked else None)
        return functional.normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)


class Both(nn.Module):
    def __init__(self, question: Tower, document: Tower) -> None:
        super().__init__()
        self.question, self.document = question, document

    def forward(
        self, q: torch.Tensor, qm: torch.Tensor, d: torch.Tensor, dm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.question(q, qm), self.document(d, dm)


class States(Both):
    """Returns the hidden states themselves, pooled by the loss."""

    def forward(
        self, q: torch.Tensor, qm: torch.Tensor, d: torch.Tensor, dm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = [t.layer(t.tokens(i) + t.places.weight[: i.shape[1]], src_key_padding_mask=~m if t.masked else None)
                 for t, i, m in ((self.question, q, qm), (self.document, d, dm))]  # fmt: skip
        return found[0], found[1]


class AtOnce(Both):
    """Looks both texts up before it reads either."""

    def forward(
        self, q: torch.Tensor, qm: torch.Tensor, d: torch.Tensor, dm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        t = self.question
        x, y = t.tokens(q), t.tokens(d)
        a, c = (t.layer(h, src_key_padding_mask=~m if t.masked else None) for h, m in ((x, qm), (y, dm)))
        return a.mean(1), (c * dm[..., None]).sum(1)


def text(lengths: list[int], width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return torch.randint(1, V, (len(lengths), width), generator=torch.Generator().manual_seed(seed)) * mask, mask


def loss(model: Any, given: Any) -> torch.Tensor:
    a, c = model(given["q"], given["qm"], given["d"], given["dm"])
    if a.dim() == 3:
        a, c = a.sum(1), (c * given["dm"][..., None]).sum(1)
    return functional.cross_entropy(
        20 * functional.normalize(a, dim=-1) @ functional.normalize(c, dim=-1).T, torch.arange(len(a))
    )


def contrastive(model: Any, *, full: bool = False, width: int = T) -> dict[str, Any]:
    (q, qm), (d, dm) = (
        text([T] * B if full else [12, 5, 7, 6, 9, 8], T, 1),
        text([min(n, width) for n in (12, 5, 7, 6, 9, 8)], width, 2),
    )
    return {
        "model": model, "batch": {"q": q, "qm": qm, "d": d, "dm": dm}, "loss_fn": loss, "pad_token_id": 0,
        "intent": "contrastive",
    }  # fmt: skip


def both(shared: bool, *, kind: type[Both] = Both, **more: Any) -> Both:
    torch.manual_seed(0)
    first = Tower(**more)
    return kind(first, first if shared else Tower(**more))


def seen(given: dict[str, Any], *, fast: bool = False) -> dict[str, Verdict]:
    case = Case([setup_of(given, fast=fast)], registry().instruments)
    found = {c.code: ask(case, c) for c in registry().select(WHO_SEES_WHOM)}
    assert not {c: v.reason for c, v in found.items() if v.outcome is Outcome.BROKEN}
    return found


def alarmed(found: dict[str, Verdict]) -> set[str]:
    return {c for c, v in found.items() if v.outcome is Outcome.FOUND}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("shape", [{}, {"full": True}, {"width": 9}])
def test_padding_seen_in_either_text(shared: bool, shape: dict[str, Any]) -> None:
    assert alarmed(seen(contrastive(both(shared, masked=False), **shape))) == {"GS102"}
    healthy = seen(contrastive(both(shared), **shape))
    assert alarmed(healthy) == set()
    assert {healthy[c].outcome for c in ("GS102", "GS103", "GS105", "GS107", "GS108")} == {Outcome.CLEAR}


@pytest.mark.parametrize("broken", [0, 1])
def test_one_tower_of_two_sees_padding(broken: int) -> None:
    torch.manual_seed(0)
    towers = [Tower(masked=k != broken) for k in range(2)]
    found = seen(contrastive(Both(*towers)))
    assert alarmed(found) == {"GS102"}
    assert f"in text {broken + 1} of the 2" in found["GS102"].findings[0].message


def test_states_of_two_texts_are_not_taken_for_one_another() -> None:
    assert alarmed(seen(contrastive(both(True, kind=States, masked=False)))) == {"GS102"}
    healthy = seen(contrastive(both(True, kind=States)))
    assert alarmed(healthy) == set()
    assert healthy["GS102"].outcome is Outcome.CLEAR


@pytest.mark.parametrize("masked", [True, False])
def test_a_text_that_cannot_be_read_by_itself_is_no_clear(masked: bool) -> None:
    found = seen(contrastive(both(True, kind=AtOnce, masked=masked)))
    assert "GS102" not in alarmed(found) or not masked
    assert not {c for c, v in found.items() if v.outcome is Outcome.CLEAR}
    assert "text 1 of the 2 that one call looks up was not looked at" in (found["GS105"].reason or "")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("fast", [True, False])
def test_batch_taken_for_time(shared: bool, full: bool, fast: bool) -> None:
    found = seen(contrastive(both(shared, batch_first=False), full=full), fast=fast)
    assert "GS105" in alarmed(found)
    assert "GS108" not in alarmed(found)


def one_tower(model: Any, given: Any) -> torch.Tensor:
    return functional.cross_entropy(20 * model(given["q"], given["qm"]) @ model(given["d"], given["dm"]).T, torch.arange(B))


@pytest.mark.parametrize("full", [True, False])
def test_batch_taken_for_time_in_two_calls(full: bool) -> None:
    torch.manual_seed(0)
    found = seen({**contrastive(Tower(batch_first=False), full=full), "loss_fn": one_tower})
    assert "GS105" in alarmed(found)
    assert "GS108" not in alarmed(found)
    assert alarmed(seen({**contrastive(Tower(), full=full), "loss_fn": one_tower})) == set()


class Tagger(nn.Module):
    """One class a position. Places from a table or from sines: nothing but their effect tells time from batch then."""

    def __init__(self, *, batch_first: bool, sines: bool) -> None:
        super().__init__()
        self.tokens, self.places, self.sines = nn.Embedding(V, D), nn.Embedding(T, D), sines
        self.layer, self.out = nn.TransformerEncoderLayer(D, 2, 32, dropout=0.0, batch_first=batch_first), nn.Linear(D, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1])
        waves = torch.sin(places[:, None] * torch.logspace(0, -2, D))
        hidden: torch.Tensor = self.out(self.layer(self.tokens(ids) + (waves if self.sines else self.places(places))))
        return hidden


@pytest.mark.parametrize("sines", [True, False])
@pytest.mark.parametrize("size", [B, T])
def test_batch_taken_for_time_without_pooling(sines: bool, size: int) -> None:
    ids = torch.randint(1, V, (size, T), generator=torch.Generator().manual_seed(0))

    def tags(model: Any, given: Any) -> torch.Tensor:
        return functional.cross_entropy(model(given["ids"]).flatten(0, 1), given["ids"].flatten() % 5)

    def setup(batch_first: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        return {
            "model": Tagger(batch_first=batch_first, sines=sines),
            "batch": {"ids": ids},
            "loss_fn": tags,
            "intent": "masked",
        }

    found = seen(setup(False))
    assert "GS105" in alarmed(found)
    assert "GS108" not in alarmed(found)
    assert alarmed(seen(setup(True))) == set()


def test_a_text_without_examples_is_no_clear() -> None:
    class Flat(Both):
        def forward(self, q: torch.Tensor, qm: torch.Tensor, d: torch.Tensor, dm: torch.Tensor) -> Any:
            bag = self.question.tokens(q.flatten()).reshape(*q.shape, D)
            return (bag * qm[..., None]).mean(1), self.document(d, dm)

    found = seen(contrastive(both(True, kind=Flat)))
    assert alarmed(found) == set()
    assert not {c for c, v in found.items() if v.outcome is Outcome.CLEAR}
