"""Whether word order reaches an encoder: told apart from dropout, which falls by position, and from positions that matter little."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ghoststep
from tests.mutations.architectures import BY_NAME, Setup, standard
from tests.mutations.flow_faults import order_blind
from tests.mutations.plain import MaskTransform, keep


def verdict(setup: Setup) -> tuple[str, str]:
    """Outcome and reason of GS108."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = ghoststep.check(**setup, select=["GS108"]).verdict("GS108")
    finally:
        torch.set_num_threads(threads)
    return found.outcome.value, found.reason or ""


def by_distance(slope: float) -> MaskTransform:
    """Scores fall with the distance of query and key."""

    def transform(bias: Tensor, training: bool) -> Tensor:
        places = torch.arange(bias.shape[-1])
        return bias - slope * (places[:, None] - places).abs()

    return transform


def without_table(transform: MaskTransform) -> Setup:
    """A sentence encoder whose position table is zero; only `transform` may tell positions apart."""
    setup = order_blind(BY_NAME["sentence_mean"])
    setup["model"].trunk.transform = transform
    return setup


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_bert_without_positions_is_found_behind_dropout_too(mode: str) -> None:
    setup = order_blind(BY_NAME["bert"])
    setup["model"].train(mode == "train")
    assert verdict(setup)[0] == "found"


def test_healthy_bert_with_dropout_is_clear() -> None:
    assert verdict(standard(BY_NAME["bert"]))[0] == "clear"


@pytest.mark.parametrize("slope", [1.0, 1e-2, 1e-3])
def test_relative_positions_that_matter_little_are_positions(slope: float) -> None:
    assert verdict(without_table(by_distance(slope)))[0] == "clear"


def test_the_same_encoder_without_them_is_found() -> None:
    assert verdict(without_table(keep))[0] == "found"


def test_dropout_that_eval_mode_does_not_stop_is_unknown() -> None:
    setup = order_blind(BY_NAME["bert"])
    model: Any = setup["model"]
    inner = model.bert.embeddings.forward
    model.bert.embeddings.forward = lambda *a, **k: torch.nn.functional.dropout(inner(*a, **k), 0.1)
    outcome, reason = verdict(setup)
    assert outcome == "unknown", reason
