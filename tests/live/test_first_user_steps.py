"""What a first user planted in setups of their own, about weights, gradients and steps; and what looks like it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ghoststep.finding import Outcome, Severity

from .test_first_user_labels import CE, Given, loud, said
from .test_xray_faults import B, D, Decoder, T, Words, setup, shifted_loss, texts


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Counting(Decoder):
    """As a model of transformers: a loss of its own that divides by the window's count where it is told."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        logits = super().forward(input_ids, attention_mask)
        count = kwargs.get("num_items_in_batch")
        loss = CE(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="mean" if count is None else "sum")
        return SimpleNamespace(loss=loss if count is None else loss / count, logits=logits)


class Deaf(Counting):
    """Takes the count and ignores it."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, attention_mask, labels)


def uneven(model: nn.Module, **more: Any) -> Given:
    batches = [texts(1, (14, 14, 14, 13)), texts(2, (6, 5, 5, 5))]
    return {"model": model, "batches": batches, "tokenizer": Words(), "accumulation_steps": 2, **more}


class TestWeights:
    def test_a_loss_that_takes_the_windows_count_is_not_accused(self) -> None:
        found = said(uneven(Counting()))["GS206"]
        assert found.outcome is Outcome.UNKNOWN
        assert "num_items_in_batch" in (found.reason or "")

    def test_one_that_ignores_it_or_a_loop_of_ones_own_is(self) -> None:
        assert "GS206" in loud(said(uneven(Deaf())))
        assert "GS206" in loud(said(uneven(Counting(), loss_fn=lambda m, b: m(**b).loss)))

    def test_the_count_in_the_batch_is_clear(self) -> None:
        given = uneven(Counting())
        count = sum(int((b["labels"][:, 1:] >= 0).sum()) for b in given["batches"])
        for b in given["batches"]:
            b["num_items_in_batch"] = torch.tensor(count)
        assert said(given)["GS206"].outcome is Outcome.CLEAR

    def test_equal_counts_are_tried_uneven(self) -> None:
        full = texts(lengths=(T,) * B)
        assert said(setup(full))["GS206"].outcome is Outcome.CLEAR

        def means(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
            logits, labels = m(b["input_ids"], b["attention_mask"])[:, :-1], b["labels"][:, 1:]
            each = CE(logits.flatten(0, 1), labels.flatten(), reduction="none").reshape(labels.shape)
            return (each.sum(1) / (labels >= 0).sum(1)).mean()

        found = said(setup(full, means))["GS206"]
        assert found.findings[0].severity is Severity.NOTE
        assert "mean of means over examples" in found.findings[0].message

    def test_the_batch_is_as_it_was(self) -> None:
        full = texts(lengths=(T,) * B)
        before = full["labels"].clone()
        said(setup(full))
        assert torch.equal(full["labels"], before)


class Adapted(Decoder):
    """A frozen decoder with an adapter of two factors in front of its head."""

    def __init__(self, *, first: float, second: float) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Parameter(first * torch.randn(D, 2)), nn.Parameter(second * torch.randn(2, D))
        self.norm.register_forward_hook(lambda m, a, o: o + o @ self.lora_A @ self.lora_B)


class TestSaddle:
    @pytest.mark.parametrize(("first", "second", "found"), [(0.0, 0.0, True), (1.0, 0.0, False), (1.0, 1.0, False)])
    def test_both_factors_zero(self, first: float, second: float, found: bool) -> None:
        verdict = said(setup(model=Adapted(first=first, second=second)))["GS603"]
        assert (verdict.outcome is Outcome.FOUND) is found
        assert not found or "hold nothing but zeros" in verdict.findings[0].message

    def test_groups_of_equal_reward(self) -> None:
        def policy(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
            logp = m(b["input_ids"], b["attention_mask"])[:, :-1].log_softmax(-1)
            loss: torch.Tensor = -(logp.gather(-1, b["input_ids"][:, 1:, None]) * 0.0).sum()
            return loss

        assert said(setup(loss_fn=policy, intent="rl"))["GS603"].outcome is not Outcome.FOUND


class TestSteps:
    @pytest.mark.parametrize(("unscales", "bound", "found"), [(False, 1.0, True), (True, 1.0, False), (False, 1e6, False)])
    def test_clipping_before_unscaling(self, unscales: bool, bound: float, found: bool) -> None:
        model = Decoder()
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=1024.0)

        def train_step(m: Any, o: Any, b: Any) -> None:
            o.zero_grad()
            scaler.scale(shifted_loss(m, b)).backward()  # type: ignore[no-untyped-call]
            if unscales:
                scaler.unscale_(o)
            nn.utils.clip_grad_norm_(m.parameters(), bound)
            scaler.step(o)
            scaler.update()

        given: Given = {"optimizer": optimizer, "scaler": scaler, "train_step": train_step, "max_grad_norm": bound}
        assert (said(setup(model=model, **given))["GS415"].outcome is Outcome.FOUND) is found

    def test_a_scheduler_does_not_hide_the_steps(self) -> None:
        model = Decoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 20))
        assert said(setup(model=model, optimizer=optimizer, scheduler=schedule))["GS406"].outcome is Outcome.CLEAR

    def test_a_frozen_table_in_the_optimizer_is_a_note(self) -> None:
        for held in (True, False):
            model = Decoder()
            model.tokens.weight.requires_grad_(False)
            parameters = [p for p in model.parameters() if held or p.requires_grad]
            found = said(setup(model=model, optimizer=torch.optim.AdamW(parameters, lr=1e-3)))["GS604"]
            assert (found.outcome is Outcome.FOUND) is held
            assert not held or found.severity is Severity.NOTE


class TestPaddingSide:
    def test_a_side_that_nothing_uses_is_no_finding(self) -> None:
        found = said(setup())["GS106"]
        assert found.outcome is Outcome.CLEAR
        assert "nothing in this setup does that" in (found.reason or "")
