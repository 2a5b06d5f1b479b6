"""A few real steps: what they show, what stays silent, and that they leave no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ghoststep.engine import Case
from ghoststep.errors import CannotLook
from ghoststep.evidence.base import Missing
from ghoststep.evidence.training import StepProbe
from ghoststep.finding import Outcome, Severity
from ghoststep.instruments.live import snapshot as snapshot_module
from ghoststep.instruments.live.optimizers import held
from ghoststep.subjects.setup import make_setup

from .training_setups import (
    GruLM,
    alarms,
    batch,
    good_step,
    gru,
    gru_loss,
    hf,
    llama,
    lm_batch,
    registry,
    same,
    snapshot,
    verdicts,
)


def probe_of(given: dict[str, Any], **more: Any) -> StepProbe | Missing:
    found = Case([make_setup(given, **more)], registry().instruments).fact(StepProbe)
    assert isinstance(found, (StepProbe, Missing))
    return found


def warm_up(optimizer: Any, steps: int = 4) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, i / steps))


def stepping(scheduler: Any, *, every: int = 1) -> Any:
    calls = []

    def step(model: Any, optimizer: Any, given: Any) -> float:
        calls.append(1)
        loss = gru_loss(model, given)
        loss.backward()  # type: ignore[no-untyped-call]
        if len(calls) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        return float(loss.detach())

    return step


class TestNothingChanges:
    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.AdamW(p, lr=1e-2),
            lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
            lambda p: torch.optim.Adagrad(p, lr=1e-2),
            lambda p: torch.optim.Adafactor(p, lr=1e-2),
            lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
        ],
    )
    @pytest.mark.parametrize("warm", [False, True])
    def test_over_optimizers(self, make: Any, warm: bool) -> None:
        model = GruLM()
        optimizer = make(model.parameters())
        scheduler = warm_up(optimizer)
        given = gru(model=model, optimizer=optimizer, scheduler=scheduler, train_step=stepping(scheduler))
        if warm:
            good_step(model, optimizer, batch(7))
            scheduler.step()
        twin = copy.deepcopy(model)
        twin_optimizer = make(twin.parameters())
        twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = snapshot(given)
        assert alarms(given) == {}
        assert same(before, snapshot(given))
        assert good_step(model, optimizer, batch(8)) == good_step(twin, twin_optimizer, batch(8))  # the next real step
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))

    def test_dropout_batchnorm_and_loaded_gradients(self) -> None:
        class Noisy(GruLM):
            def __init__(self) -> None:
                super().__init__()
                self.drop, self.bn = nn.Dropout(0.3), nn.BatchNorm1d(16)
                self.norm = nn.Sequential()  # type: ignore[assignment]

            def forward(self, tokens: Any, targets: Any = None) -> Any:
                self.token_table.weight  # noqa: B018
                self.bn(self.token_table(tokens).flatten(0, 1))
                return super().forward(tokens, targets)

        model = Noisy().train()
        given = gru(model=model)
        gru_loss(model, batch(1)).backward()  # type: ignore[no-untyped-call]
        before = snapshot(given)
        probe_of(given)
        assert same(before, snapshot(given))

    def test_after_an_exception(self) -> None:
        count = []

        def step(model: Any, optimizer: Any, given: Any) -> float:
            count.append(1)
            if len(count) == 2:
                raise ValueError("the user's own trouble")
            return good_step(model, optimizer, given)

        given = gru(train_step=step)
        before = snapshot(given)
        found = probe_of(given)
        assert isinstance(found, Missing)
        assert "the user's own trouble" in found.reason
        assert same(before, snapshot(given))

    def test_fp16_scaler_and_its_scheduler(self) -> None:
        model = GruLM()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        scaler.scale(torch.zeros(()))  # makes the scale
        given = gru(model=model, optimizer=optimizer, scaler=scaler, train_step=None, max_grad_norm=1.0)
        before = snapshot(given)
        assert alarms(given) == {}
        assert same(before, snapshot(given))


class TestUnchangedWeights:
    def test_bf16_at_a_small_rate(self) -> None:
        given = hf(llama(torch.bfloat16), optimizer=None)
        given["optimizer"] = torch.optim.AdamW(given["model"].parameters(), lr=1e-6)
        found = verdicts(given, "GS406")["GS406"]
        assert found.severity is Severity.ERROR
        assert "bfloat16 numbers are" in found.findings[0].message

    def test_bf16_at_a_large_rate_is_at_most_a_note(self) -> None:
        given = hf(llama(torch.bfloat16), optimizer=None)
        given["optimizer"] = torch.optim.AdamW(given["model"].parameters(), lr=1e-2)
        assert alarms(given) == {}

    def test_fp32_at_a_small_rate_is_silent(self) -> None:
        given = hf(llama(), optimizer=None)
        given["optimizer"] = torch.optim.AdamW(given["model"].parameters(), lr=1e-6)
        assert alarms(given) == {}

    def test_kahan_summation_is_unknown(self) -> None:
        class Kahan(torch.optim.Optimizer):
            def __init__(self, params: Any, lr: float) -> None:
                super().__init__(params, {"lr": lr})

            @torch.no_grad()
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                for group in self.param_groups:
                    for p in group["params"]:
                        s = self.state[p]
                        s.setdefault("m", torch.zeros_like(p))
                        s.setdefault("lost", torch.zeros_like(p, dtype=torch.float32))
                        wanted = s["lost"] - group["lr"] * p.grad.sign().float()
                        old = p.float()
                        p.copy_((old + wanted).to(p.dtype))
                        s["lost"] = wanted - (p.float() - old)

        given = hf(llama(torch.bfloat16))
        given["optimizer"] = Kahan(given["model"].parameters(), 1e-6)
        assert verdicts(given, "GS406")["GS406"].outcome is Outcome.UNKNOWN

    def test_rate_zero_for_good(self) -> None:
        found = verdicts(gru(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.0)), "GS406")["GS406"]
        assert found.severity is Severity.ERROR
        assert "learning rate is 0" in found.findings[0].message

    def test_schedule_that_stays_at_zero(self) -> None:
        model = GruLM()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.0)
        found = verdicts(gru(model=model, optimizer=optimizer, scheduler=scheduler, train_step=stepping(scheduler)), "GS406")
        assert "the scheduler keeps it there" in found["GS406"].findings[0].message

    def test_warm_up_from_zero_is_silent(self) -> None:
        for steps in (2, 50):
            model = GruLM()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            scheduler = warm_up(optimizer, steps)
            given = gru(model=model, optimizer=optimizer, scheduler=scheduler, train_step=stepping(scheduler))
            assert alarms(given) == {}

    def test_train_step_without_a_step(self) -> None:
        def step(model: Any, optimizer: Any, given: Any) -> float:
            gru_loss(model, given).backward()  # type: ignore[no-untyped-call]
            return 0.0

        assert set(alarms(gru(train_step=step))) == {"GS406"}

    def test_undeclared_accumulation_is_waited_for(self) -> None:
        count = []

        def step(model: Any, optimizer: Any, given: Any) -> float:
            count.append(1)
            gru_loss(model, given).backward()  # type: ignore[no-untyped-call]
            if len(count) % 8 == 0:
                optimizer.step()
                optimizer.zero_grad()
            return 0.0

        assert alarms(gru(train_step=step)) == {}
        found = probe_of(gru(train_step=step))
        assert isinstance(found, StepProbe)
        assert found.num_calls == 8

    def test_longer_accumulation_than_is_run_is_unknown(self) -> None:
        assert verdicts(gru(accumulation_steps=64), "GS406")["GS406"].outcome is Outcome.UNKNOWN

    def test_equal_rewards_are_unknown_not_found(self) -> None:
        given = gru(loss_fn=lambda m, b: gru_loss(m, b) * 0.0, train_step=None)
        assert alarms(given) == {}
        assert verdicts(given, "GS406")["GS406"].outcome is Outcome.UNKNOWN

    def test_lora_first_step(self) -> None:
        class Lora(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base = GruLM().requires_grad_(False)
                self.a, self.b = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.zeros(40, 4))

            def forward(self, tokens: Any, targets: Any) -> Any:
                hidden, _ = self.base.cell(self.base.token_table(tokens))
                logits = self.base.out(hidden) + hidden @ self.a.T @ self.b.T
                return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()), logits

        model = Lora()
        assert alarms(gru(model=model, optimizer=torch.optim.AdamW([model.a, model.b], lr=1e-3))) == {}


class TestClearing:
    def test_never_cleared(self) -> None:
        def step(model: Any, optimizer: Any, given: Any) -> float:
            gru_loss(model, given).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # hides the growth
            optimizer.step()
            return 0.0

        found = alarms(gru(train_step=step))
        assert set(found) == {"GS412"}
        assert "9 of 9 parameters" in found["GS412"]

    def test_clears_another_optimizer(self) -> None:
        model = GruLM()
        stale = torch.optim.AdamW(GruLM().parameters())

        def step(model: Any, optimizer: Any, given: Any) -> float:
            stale.zero_grad()
            gru_loss(model, given).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return 0.0

        assert set(alarms(gru(model=model, train_step=step))) == {"GS412"}

    def test_cleared_before_the_step(self) -> None:
        for to_none in (True, False):

            def step(model: Any, optimizer: Any, given: Any, to_none: bool = to_none) -> float:
                gru_loss(model, given).backward()  # type: ignore[no-untyped-call]
                optimizer.zero_grad(set_to_none=to_none)
                optimizer.step()
                return 0.0

            assert set(alarms(gru(train_step=step))) == {"GS413"}

    @pytest.mark.parametrize("to_none", [True, False])
    @pytest.mark.parametrize("after", [True, False])
    def test_orders_that_work(self, to_none: bool, after: bool) -> None:
        def step(model: Any, optimizer: Any, given: Any) -> float:
            if not after:
                optimizer.zero_grad(set_to_none=to_none)
            gru_loss(model, given).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if after:
                model.zero_grad(set_to_none=to_none)
            return 0.0

        assert alarms(gru(train_step=step)) == {}

    def test_accumulation_and_closure_are_silent(self) -> None:
        count = []

        def accumulate(model: Any, optimizer: Any, given: Any) -> float:
            count.append(1)
            (gru_loss(model, given) / 2).backward()  # type: ignore[no-untyped-call]
            if len(count) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            return 0.0

        def closure_step(model: Any, optimizer: Any, given: Any) -> float:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = gru_loss(model, given)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            return float(optimizer.step(closure).detach())

        assert alarms(gru(train_step=accumulate, accumulation_steps=2)) == {}
        assert alarms(gru(train_step=closure_step)) == {}


class TestScheduler:
    def test_of_another_optimizer(self) -> None:
        scheduler = warm_up(torch.optim.AdamW(GruLM().parameters(), lr=1e-3))
        assert set(alarms(gru(scheduler=scheduler))) == {"GS608"}

    def test_not_advanced_is_a_note(self) -> None:
        model = GruLM()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1.0 / (i + 1))
        found = verdicts(gru(model=model, optimizer=optimizer, scheduler=scheduler), "GS608", "GS607")
        assert found["GS608"].severity is Severity.NOTE
        assert found["GS607"].severity is Severity.NOTE  # starts at its largest rate

    def test_per_micro_batch(self) -> None:
        model = GruLM()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = warm_up(optimizer)
        given = gru(
            model=model, optimizer=optimizer, scheduler=scheduler, train_step=stepping(scheduler, every=4), accumulation_steps=4
        )
        found = alarms(given)
        assert set(found) == {"GS609"}
        assert "8 times in 2 optimizer steps" in found["GS609"]


class TestScaler:
    def run(self, *, update: bool, scale: float = 2.0**100, loss_times: float = 1.0) -> dict[str, Any]:
        model = GruLM()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(torch.zeros(()))

        def step(model: Any, optimizer: Any, given: Any) -> float:
            optimizer.zero_grad()
            scaler.scale(gru_loss(model, given) * 1e15 * loss_times).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            if update:
                scaler.update()
            elif scaler._per_optimizer_states:
                scaler._per_optimizer_states.clear()
            return 0.0

        return gru(model=model, scaler=scaler, train_step=step, loss_fn=lambda m, b: gru_loss(m, b) * 1e15 * loss_times)

    def test_early_skips_are_silent(self) -> None:
        given = self.run(update=True)
        before = snapshot(given)
        found = verdicts(given, "GS407")["GS407"]
        assert found.outcome is Outcome.CLEAR
        assert found.reason is not None
        assert "skipped" in found.reason
        assert same(before, snapshot(given))

    def test_without_update(self) -> None:
        found = verdicts(self.run(update=False), "GS407")["GS407"]
        assert found.severity is Severity.ERROR
        assert "scaler.update()" in found.findings[0].message


class TestRoom:
    def test_too_little_memory_is_unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = GruLM()
        monkeypatch.setattr(snapshot_module, "free_bytes", lambda device: 1000)
        with pytest.raises(CannotLook, match="do not fit twice"):
            snapshot_module.need_room(model, held(torch.optim.AdamW(model.parameters())))
        assert verdicts(gru(), "GS406")["GS406"].outcome is Outcome.UNKNOWN

    def test_fast_takes_no_step(self) -> None:
        found = probe_of(gru(), fast=True)
        assert isinstance(found, Missing)
        assert "--fast" in found.reason

    def test_one_call_for_a_whole_window(self) -> None:
        calls = []

        def step(model: Any, optimizer: Any, given: Any) -> float:
            calls.append(1)
            return good_step(model, optimizer, given)

        found = probe_of(gru(train_step=step, accumulation_steps=8))
        assert isinstance(found, StepProbe)
        assert found.num_calls == 2
        assert calls == []  # what the step keeps is put back


def test_lm_batches_are_in_range() -> None:
    assert int(lm_batch()["input_ids"].max()) < 64
