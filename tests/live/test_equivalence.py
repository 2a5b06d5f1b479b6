"""Padding and its side, and where a pooled vector is taken from: each fault found, its healthy twin silent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghoststep.engine import Case
from ghoststep.evidence.equivalence import Equivalence, Pooling, Variant
from ghoststep.finding import Outcome, Severity
from ghoststep.subjects.setup import make_setup
from tests.live import influence_faults as faults
from tests.live.influence_models import PAD, TinyLM, bad, lm_batch, packed_batch, registry, seeded, verdicts


def fact(kind: type, model: nn.Module, batch: dict[str, torch.Tensor], **more: Any) -> Any:
    setup = make_setup({"model": model, "batch": batch, "pad_token_id": PAD, **more})
    return Case([setup], registry().instruments).fact(kind)


class _Tokenizer:
    padding_side = "left"
    pad_token_id = PAD


class TestPaddingSide:
    def test_left_padding_with_learned_positions_is_an_error(self) -> None:
        found = verdicts(seeded(TinyLM), lm_batch(side="left"))["GS106"]
        assert found.outcome is Outcome.FOUND
        assert found.severity is Severity.ERROR
        assert "padding on the left" in found.findings[0].message

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_by_how_much(self, dtype: torch.dtype) -> None:
        equivalence = fact(Equivalence, seeded(lambda: TinyLM().to(dtype)), lm_batch(side="left"))
        batched = next(r for r in equivalence.readings if r.variant is Variant.AS_BATCHED)
        assert batched.change > 0.3
        assert batched.num_above == batched.num_positions
        assert batched.starts_move

    def test_a_side_that_nothing_uses_is_told_beside_a_clear(self) -> None:
        found = verdicts(seeded(TinyLM), lm_batch())["GS106"]
        assert found.outcome is Outcome.CLEAR
        assert found.reason is not None
        assert "padded on the left" in found.reason
        assert "nothing in this setup does that" in found.reason

    def test_the_tokenizers_side_is_a_warning(self) -> None:
        found = verdicts(seeded(TinyLM), lm_batch(), tokenizer=_Tokenizer())["GS106"]
        assert found.severity is Severity.WARNING
        assert "the tokenizer pads on the left" in found.findings[0].message

    def test_relative_positions_do_not_care(self) -> None:
        for side in ("left", "right"):
            found = verdicts(seeded(lambda: TinyLM(absolute=False)), lm_batch(side=side))["GS106"]
            assert found.outcome is Outcome.CLEAR, found.findings

    def test_padding_that_is_seen_is_told_once(self) -> None:
        from ghoststep.diagnosis import diagnose

        found = verdicts(seeded(faults.Recurrent), lm_batch(side="left"))
        told = diagnose(list(found.values()), registry().checks)
        assert [v.code for v in told if v.outcome is Outcome.FOUND and v.severity is Severity.ERROR] == ["GS102"]

    def test_packs_and_batches_without_padding_do_not_apply(self) -> None:
        assert verdicts(seeded(lambda: TinyLM(faults.packs)), packed_batch())["GS106"].outcome is Outcome.NOT_APPLICABLE
        one = {k: v[:1] for k, v in lm_batch().items()}
        assert verdicts(seeded(TinyLM), one)["GS106"].outcome is Outcome.NOT_APPLICABLE

    def test_it_costs_five_single_examples_and_five_where_something_moved(self) -> None:
        assert fact(Equivalence, seeded(TinyLM), lm_batch()).num_forward == 10 / 4
        assert fact(Equivalence, seeded(lambda: TinyLM(absolute=False)), lm_batch()).num_forward == 5 / 4


class Embedder(nn.Module):
    """One vector a text. how: "mean", "masked mean", "maximum", "last", "last real" or "first"."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lm, self.how = TinyLM(absolute=False), how
        self.lm.head = nn.Identity()  # type: ignore[assignment]

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.lm(input_ids, attention_mask).logits
        keep = attention_mask[..., None]
        last = attention_mask.cumsum(1).argmax(1)
        vectors: dict[str, torch.Tensor] = {
            "mean": hidden.mean(1),
            "masked mean": (hidden * keep).sum(1) / keep.sum(1),
            "maximum": hidden.max(1).values,
            "masked maximum": hidden.masked_fill(keep == 0, -1e9).max(1).values,
            "last": hidden[:, -1],
            "last real": hidden[torch.arange(len(hidden)), last],
            "first": hidden[:, 0],
        }
        return vectors[self.how]


def two_calls(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """InfoNCE over two separate calls of the model."""
    one = functional.normalize(model(batch["input_ids"], batch["attention_mask"]), dim=-1)
    two = functional.normalize(model(batch["input_ids"].flip(0), batch["attention_mask"].flip(0)), dim=-1)
    return functional.cross_entropy(one @ two.T / 0.05, torch.arange(len(one)))


def one_call(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    vectors = model(batch["input_ids"], batch["attention_mask"])
    weights: torch.Tensor = vectors.square().sum(-1) * torch.arange(1, len(vectors) + 1)
    return weights.sum()


POOLED = [
    ("mean", "right", "GS110"),
    ("mean", "left", "GS110"),
    ("maximum", "right", "GS110"),
    ("last", "right", "GS111"),
    ("first", "left", "GS111"),
    ("masked mean", "right", None),
    ("masked mean", "left", None),
    ("masked maximum", "right", None),
    ("last real", "right", None),
    ("last", "left", None),
    ("first", "right", "GS111"),  # the model is causal: its first position knows nothing of the text
]


@pytest.mark.parametrize("loss_fn", [one_call, two_calls])
@pytest.mark.parametrize(("how", "side", "code"), POOLED)
def test_pooling(how: str, side: str, code: str | None, loss_fn: Any) -> None:
    batch = {k: v for k, v in lm_batch(side=side).items() if k != "labels"}
    found = verdicts(seeded(lambda: Embedder(how)), batch, loss_fn=loss_fn)
    assert bad(found) == ({code} if code else set())
    if not code:
        assert found["GS110"].outcome is Outcome.CLEAR
        assert found["GS111"].outcome is Outcome.CLEAR


def test_a_language_model_is_not_pooled() -> None:
    found = verdicts(seeded(TinyLM), lm_batch())
    assert found["GS110"].outcome is Outcome.NOT_APPLICABLE


def test_pooling_changes_nothing() -> None:
    batch = {k: v for k, v in lm_batch().items() if k != "labels"}
    model = seeded(lambda: Embedder("mean"))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fact(Pooling, model, batch, loss_fn=one_call)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
