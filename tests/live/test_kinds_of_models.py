"""Kinds of models that stand out among transformers' classes, each the smallest that shows it: what may be said, and what not."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghoststep.engine import Case, ask
from ghoststep.evidence.base import Evidence, Missing
from ghoststep.evidence.influence import Influence, Region
from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Outcome, Verdict
from ghoststep.registry import instrument
from ghoststep.subjects.setup import make_setup
from tests.live.influence_models import PAD, D, T, TinyLM, V, bad, lm_batch, registry, right, seeded, verdicts


class _OnlyInTraining(torch.autograd.Function):
    """A backward of Python code that refuses, as reversible layers do in eval mode."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, training: bool) -> torch.Tensor:
        ctx.training = training
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert ctx.training, "only in training mode"
        return gradients[0], None


class Reversible(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _OnlyInTraining.apply(x, self.training)  # type: ignore[no-untyped-call]
        return out


def every_verdict(model: nn.Module) -> dict[str, Verdict]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    setup = make_setup({"model": model, "batch": lm_batch(), "pad_token_id": PAD, "optimizer": optimizer})
    case = Case([setup], registry().instruments)
    return {c.code: ask(case, c) for c in registry().checks}


def test_a_backward_that_raises_in_eval_mode_leaves_the_swaps() -> None:
    found = every_verdict(seeded(lambda: TinyLM(mix=Reversible()), train=False))
    assert not [v for v in found.values() if v.outcome is Outcome.BROKEN]
    assert found["GS101"].outcome is Outcome.CLEAR
    assert found["GS405"].outcome is Outcome.UNKNOWN
    assert "only in training mode" in (found["GS405"].reason or "")


def test_a_visible_future_is_found_without_a_gradient() -> None:
    see_all = lambda ids, keep, _: None if keep is None else keep.bool()[:, None, None, :].expand(-1, 1, ids.shape[1], -1)  # noqa: E731
    found = verdicts(seeded(lambda: TinyLM(see_all, mix=Reversible()), train=False), lm_batch())
    assert "GS101" in bad(found)


class _Reached(Evidence):
    __slots__ = ()


@pytest.mark.parametrize(
    ("fails", "outcome"),
    [
        (lambda: nn.Sequential(Refusing())(torch.zeros(1)), Outcome.UNKNOWN),
        (lambda: _OnlyInTraining.apply(torch.zeros(1, requires_grad=True), False).backward(), Outcome.UNKNOWN),  # type: ignore[no-untyped-call]
        (lambda: nn.Linear(2, 2)(torch.zeros(3)), Outcome.BROKEN),  # torch alone: the call was ours
        (lambda: int("x"), Outcome.BROKEN),
    ],
)  # fmt: skip
def test_what_a_model_raises_is_unknown_and_what_we_raise_is_broken(fails: Callable[[], Any], outcome: Outcome) -> None:
    @instrument
    def reach(influence: Influence) -> _Reached:
        fails()
        return _Reached()

    known = object.__new__(Influence)
    found = Case([known], [reach]).fact(_Reached)
    assert isinstance(found, Missing)
    assert found.outcome is outcome


class Refusing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such language")


class OwnSeeds(nn.Module):
    """Dropout from a seed of the operating system: no two runs are alike, whatever seed was set before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))
        kept = torch.rand(x.shape, generator=generator) > 0.2
        return x * kept


@pytest.mark.parametrize("train", [True, False])
def test_noise_of_another_mode_is_no_visible_future(train: bool) -> None:
    found = verdicts(seeded(lambda: TinyLM(mix=OwnSeeds()), train=train), lm_batch())
    assert "GS101" not in bad(found), found["GS101"].findings
    assert found["GS101"].outcome is (Outcome.CLEAR if not train else found["GS101"].outcome)


def test_a_future_in_training_mode_only_is_still_found() -> None:
    def future(module: nn.Module, args: Any, x: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * x.roll(-1, 1) if module.training else x

    mix = nn.Identity()
    mix.register_forward_hook(future)
    found = verdicts(seeded(lambda: TinyLM(mix=mix), train=False), lm_batch())
    assert "GS101" in bad(found)


class FillsUp(nn.Module):
    """Pads every text to a multiple of 16 by itself, and gives the hidden states of all of them to its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyLM(right, absolute=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        num = -input_ids.shape[1] % 16
        ids, keep = (functional.pad(x, (0, num), value=0) for x in (input_ids, attention_mask))
        logits = self.inner(ids, keep).logits[:, : input_ids.shape[1]]
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def test_pads_of_the_models_own_are_not_taken_for_the_text() -> None:
    found = verdicts(seeded(FillsUp), lm_batch(), loss_fn=lambda m, b: m(**b))
    assert not bad(found), {c: found[c].findings for c in bad(found)}
    assert found["GS106"].outcome is Outcome.UNKNOWN
    assert "fills a text" in (found["GS106"].reason or "")


class NoMixing(nn.Module):
    """No position sees another; examples do if `leak`. Batch and time could be taken for each other, were it not for the pads."""

    def __init__(self, *, leak: bool) -> None:
        super().__init__()
        self.embed, self.mlp, self.head, self.leak = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V), leak

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        x = x + 0.1 * x.roll(1, 0) if self.leak else x
        logits: torch.Tensor = self.head(torch.tanh(self.mlp(x)))
        return logits


def masked_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


@pytest.mark.parametrize("leak", [True, False])
def test_a_leak_between_examples_is_not_taken_for_time(leak: bool) -> None:
    batch = lm_batch()
    lengths = torch.tensor([T, 7, T - 2, 9])  # not in order: no text could run through the batch
    keep = torch.arange(T) < lengths[:, None]
    batch = {"input_ids": batch["input_ids"].clamp(min=3).masked_fill(~keep, PAD), "attention_mask": keep.long(),
             "labels": batch["input_ids"].masked_fill(~keep, -100)}  # fmt: skip
    found = verdicts(seeded(lambda: NoMixing(leak=leak)), batch, loss_fn=masked_loss, intent="masked")
    assert found["GS105"].outcome is (Outcome.FOUND if leak else Outcome.UNKNOWN)
    assert "GS102" not in bad(found)


class Streams(nn.Module):
    """A head over several streams at once: logits [B, n, T, V], each stream trained on the same labels."""

    def __init__(self, *, shift: int) -> None:
        super().__init__()
        self.embed, self.head, self.streams, self.shift = (
            nn.Embedding(V, D),
            nn.Linear(D, V),
            nn.Parameter(torch.randn(3, D)),
            shift,
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        hidden = self.embed(input_ids)[:, None] + self.streams[None, :, None]
        logits = self.head(torch.tanh(hidden))
        wanted = labels[:, self.shift :][:, None].expand(-1, 3, -1)
        stop = logits.shape[2] - self.shift
        return functional.cross_entropy(logits[:, :, :stop].flatten(0, 2), wanted.flatten(), ignore_index=-100)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_head_over_several_streams_is_read(shift: int) -> None:
    batch = lm_batch()
    setup = make_setup({"model": seeded(lambda: Streams(shift=shift)), "batch": batch, "loss_fn": lambda m, b: m(**b)})
    found = Case([setup], registry().instruments).fact(LossXray)
    assert isinstance(found, LossXray), found
    labels = functional.pad(batch["labels"][:, shift:], (0, shift), value=-100)
    for target_BT in (found.target_BT, *(f.target_BT for f in found.further)):
        assert target_BT.tolist() == labels.masked_fill(labels < 0, -1).tolist()
    assert len(found.further) == 2
    assert found.weight_BT[0, 0] == pytest.approx(1 / (3 * int((labels >= 0).sum())), rel=1e-5)


def test_the_regions_of_a_model_that_turns_inside_are_read_along_time() -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(V, D), nn.GRU(D, D), nn.Linear(D, V)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.rnn(self.embed(input_ids.T))[0].transpose(0, 1))
            return logits

    def loss(m: Any, b: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(
            m(b["input_ids"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten(), ignore_index=-100
        )

    setup = make_setup({"model": seeded(Turning), "batch": lm_batch(), "loss_fn": loss, "pad_token_id": PAD})
    found = Case([setup], registry().instruments).fact(Influence)
    assert isinstance(found, Influence), found
    assert found.is_time_first
    assert found.readings[Region.PAST].relative > 0
    assert found.readings[Region.FUTURE].relative == 0
    said = verdicts(seeded(Turning), lm_batch(), loss_fn=loss)
    assert said["GS106"].outcome is Outcome.CLEAR, said["GS106"]
    assert not bad(said)


class WithScale(nn.Embedding):
    """Gives (rows, scale), as a quantised table does."""

    def forward(self, input: torch.Tensor) -> Any:  # noqa: A002 - torch's name
        return super().forward(input), None


class QuantisedTable(nn.Module):
    def __init__(self, *, future: bool) -> None:
        super().__init__()
        self.words, self.mix, self.head, self.future = WithScale(V, D), nn.GRU(D, D, batch_first=True), nn.Linear(D, V), future

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        x, _scale = self.words(input_ids)
        hidden = self.mix(x)[0]
        logits = self.head(hidden + 0.1 * hidden.roll(-1, 1) if self.future else hidden)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@pytest.mark.parametrize("future", [True, False])
def test_a_table_that_gives_a_scale_beside_its_rows_is_a_table(future: bool) -> None:
    model = seeded(lambda: QuantisedTable(future=future))
    found = verdicts(model, lm_batch(), loss_fn=lambda m, b: m(**b))
    assert ("GS101" in bad(found)) if future else not bad(found)  # the last position sees the pad behind it too
    assert found["GS105"].outcome is Outcome.CLEAR
    labels = Case([make_setup({"model": model, "batch": lm_batch(), "loss_fn": lambda m, b: m(**b)})], registry().instruments)
    assert isinstance(labels.fact(LossXray), LossXray)
