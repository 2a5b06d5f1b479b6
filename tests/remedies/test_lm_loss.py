"""`ghoststep.lm_loss` against its definition, and as what the label checks call healthy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ghoststep
from ghoststep.errors import UsageError
from ghoststep.finding import Outcome

V = 32


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(V, (3, 7), generator=g)
    labels[1, 4:] = -100
    return torch.randn(3, 7, V, generator=g), labels


def by_hand(logits: torch.Tensor, labels: torch.Tensor) -> float:
    log_p = logits.double().log_softmax(-1)
    losses = [-log_p[b, t, labels[b, t + 1]] for b in range(3) for t in range(6) if labels[b, t + 1] != -100]
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_mean_over_next_tokens_that_count(dtype: torch.dtype) -> None:
    logits, labels = logits_and_labels()
    logits = logits.to(dtype)
    found = ghoststep.lm_loss(logits, labels)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(by_hand(logits, labels), rel=1e-6)


def test_micro_batches_add_up_to_the_window() -> None:
    logits, labels = logits_and_labels()
    count = (labels[:, 1:] != -100).sum()
    parts = [ghoststep.lm_loss(logits[b : b + 1], labels[b : b + 1], num_tokens=count) for b in range(3)]
    assert float(torch.stack(parts).sum()) == pytest.approx(by_hand(logits, labels), rel=1e-6)


def test_nothing_to_train_is_zero_without_nan() -> None:
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    loss = ghoststep.lm_loss(logits, torch.full_like(labels, -100))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert float(loss) == 0
    assert not gradient.any()


def test_other_shapes_are_refused() -> None:
    logits, labels = logits_and_labels()
    with pytest.raises(UsageError, match=r"expected \[B, T, V\] and \[B, T\]"):
        ghoststep.lm_loss(logits[:, :-1], labels)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.mix, self.head = nn.Embedding(V, 24), nn.GRU(24, 24, batch_first=True), nn.Linear(24, V)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.mix(self.tokens(ids))[0])
        return logits


@pytest.mark.parametrize("shifted_before", [False, True])
def test_the_advice_of_unshifted_labels_holds(shifted_before: bool) -> None:
    """GS201 recommends it: with it the label checks are clear, and shifting before it is found."""
    ids = torch.randint(V, (4, 12), generator=torch.Generator().manual_seed(1))

    def loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch["ids"].roll(-1, 1).index_fill(1, torch.tensor([11]), -100) if shifted_before else batch["ids"]
        return ghoststep.lm_loss(model(batch["ids"]), labels)

    report = ghoststep.check(model=Model(), batch={"ids": ids}, loss_fn=loss_fn, select=("GS201", "GS202"))
    found = {v.code: v.outcome for v in report.verdicts}
    assert found == {"GS201": Outcome.CLEAR, "GS202": Outcome.FOUND if shifted_before else Outcome.CLEAR}
