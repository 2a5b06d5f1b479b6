"""What is recorded of unusual loops: every step once, and nothing of another model's."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from ghoststep.evidence.steps import UNWATCHED, StepOutcome
from ghoststep.finding import Outcome
from tests.watch import more_loops, other_loops
from tests.watch.loops import (
    Loop,
    TinyLM,
    float64_by_default,
    language_model,
    next_token_loss,
    run,
    same,
    steps_of,
    tokens,
    watch,
)


@pytest.mark.parametrize("clip", ["torch", "ours"])
def test_models_in_turns_are_told_apart(clip: str) -> None:
    """Gradients of each stay until its own next turn: the other one's backward must not count."""

    def make() -> Loop:
        loops = [language_model(clip=clip)(), language_model(reduction="sum", clip=clip)()]

        def step(i: int) -> torch.Tensor:
            return torch.stack([x.step(i) for x in loops]).sum()

        return Loop(models=[x.models[0] for x in loops], optimizers=[x.optimizers[0] for x in loops], step=step)

    ran = run(make, 12, flush_steps=5)
    for w, is_right in zip(ran.watches, (lambda x: 2 < x < 6, lambda x: x > 80), strict=True):
        steps = steps_of(w)
        assert [s.number for s in steps] == list(range(1, 13))
        assert {s.num_micro_batches for s in steps} == {1}
        assert {s.num_tokens for s in steps} == {48}
        assert all(s.loss is not None and is_right(s.loss) for s in steps)  # type: ignore[no-untyped-call]
        assert {s.clip_bound for s in steps} == {1.0}


def test_graph_nodes_are_those_of_the_own_loss() -> None:
    small, large = nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (small, large)]
    with watch(small, optimizers[0]) as one, watch(large, optimizers[1]) as other:
        for _ in range(4):
            for model, optimizer in zip((small, large), optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    assert min(s.num_graph_nodes or 0 for s in steps_of(other)) > 100
    assert max(s.num_graph_nodes or 0 for s in steps_of(one)) < 15


def test_gradients_that_nobody_used_are_no_part_of_the_next_step() -> None:
    """A loop that throws a bad batch away before its step."""
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, optimizer) as w:
        for i in range(6):
            ids = tokens(i)
            loss = next_token_loss(model(ids), ids)
            if i == 3:
                (loss * 1e6).backward()  # type: ignore[no-untyped-call]
                optimizer.zero_grad()
                continue
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    steps = steps_of(w)
    assert [s.num_micro_batches for s in steps] == [1] * 5
    assert [s.num_tokens for s in steps] == [48] * 5
    assert max(r.gradient_norm for s in steps for r in s.rows) < 1


def test_accumulation_is_one_step() -> None:
    (w,) = run(language_model(accumulate=4), 10, flush_steps=3).watches
    steps = steps_of(w)
    assert [s.num_micro_batches for s in steps] == [4] * 10
    assert [s.num_tokens for s in steps] == [192] * 10
    assert {r.micro_batch for s in steps for r in s.rows} == {0, 1, 2, 3}


def test_several_optimizers_are_one_step() -> None:
    (w,) = run(other_loops.two_optimizers, 10, flush_steps=3).watches
    steps = steps_of(w)
    assert [s.number for s in steps] == list(range(1, 11))
    assert {s.lrs for s in steps} == {(2e-3, 3e-3)}
    assert all(s.norm_after is not None and s.norm_after <= 1.0001 for s in steps)
    assert {s.num_gradients for s in steps} == {len(w.flusher.facts.trainable)}


def test_steps_without_a_backward_do_not_fill_the_ring() -> None:
    """Gradients by `autograd.grad`, and a model that is not called as a module."""
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer, flush_steps=4) as w:
        for i in range(30):
            loss = next_token_loss(model.head(model.hidden(tokens(i))), tokens(i))
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                p.grad = g
            optimizer.step()
    assert not w.faults.lines()
    assert [s.number for s in steps_of(w)] == list(range(1, 31))


def test_closures_and_evaluations() -> None:
    (w,) = run(more_loops.closures, 10, flush_steps=3).watches
    assert len(steps_of(w)) == 10
    assert {s.num_micro_batches for s in steps_of(w)} <= {1, 2, 3, 4}
    (w,) = run(more_loops.evaluated, 20, flush_steps=3).watches
    assert [s.num_tokens for s in steps_of(w)] == [48] * 20


def test_skips_of_the_scaler() -> None:
    (w,) = run(language_model(autocast=torch.float16, init_scale=2.0**40), 40, flush_steps=7).watches
    steps = steps_of(w)
    outcomes = [s.outcome for s in steps]
    assert len(steps) == 40
    num_skipped = outcomes.index(StepOutcome.STEPPED)
    assert 10 < num_skipped < 39
    assert outcomes[num_skipped : num_skipped + 10] == [StepOutcome.STEPPED] * 10  # then the scale grows again
    assert [s.scale for s in steps][:3] == [2.0**40, 2.0**39, 2.0**38]
    assert all(s.loss is not None and 1 < s.loss < 6 for s in steps)
    assert all(s.norm is not None and s.norm < 20 for s in steps if s.outcome is StepOutcome.STEPPED)


def test_skips_of_a_fused_optimizer() -> None:
    make = language_model(
        autocast=torch.float16, init_scale=2.0**40, clip="", optimizer=lambda p: torch.optim.AdamW(p, fused=True, lr=1e-3)
    )
    (w,) = run(make, 40, flush_steps=7).watches
    outcomes = [s.outcome for s in steps_of(w)]
    assert 10 < outcomes.count(StepOutcome.SKIPPED_BY_SCALER) < 39
    taken = [s for s in steps_of(w) if s.outcome is StepOutcome.STEPPED]
    assert all(s.norm_after == pytest.approx(s.norm, rel=1e-2) for s in taken)


def test_thawed_parameters_are_told() -> None:
    (w,) = run(more_loops.frozen_midway, 60, flush_steps=7).watches
    assert "blocks.1" in w.flusher.facts.unseen[UNWATCHED]
    assert all("blocks.1" in (v.reason or "") for v in w.report().verdicts if v.outcome is Outcome.CLEAR)
    counts = [s.num_gradients for s in steps_of(w)]
    assert counts[0] == counts[19] == len(w.flusher.facts.trainable)
    assert counts[25] == counts[0] - 1


@pytest.mark.parametrize("in_optimizer", [True, False])
def test_a_head_that_is_put_in_anothers_place_is_told(in_optimizer: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer, flush_steps=4) as w:
        for step in range(30):
            if step == 10:
                assert not w.flusher.facts.unseen
                model.head = torch.nn.Linear(model.head.in_features, model.head.out_features, bias=False)
                if in_optimizer:
                    optimizer.add_param_group({"params": list(model.head.parameters())})
            optimizer.zero_grad()
            next_token_loss(model(tokens(step)), tokens(step)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert "1 of the model's parameters (such as head.weight)" in w.flusher.facts.unseen[UNWATCHED]
    assert caplog.text.count("in another's place") == 1


def test_modules_that_borrow_tensors_for_a_call_are_not_told() -> None:
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer, flush_steps=1) as w:
        for step in range(12):
            optimizer.zero_grad()
            lent: dict[str, torch.Tensor] = {n: torch.nn.Parameter(p.detach() * 1.0) for n, p in model.named_parameters()}
            torch.func.functional_call(model, lent, (tokens(step),))
            next_token_loss(model(tokens(step)), tokens(step)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert not w.flusher.facts.unseen


def test_optimizers_that_nobody_named_are_found_and_let_go() -> None:
    (w,) = run(more_loops.grown, 60, flush_steps=7).watches
    steps = steps_of(w)
    assert len(steps) == 60
    assert {s.lrs for s in steps} == {(1e-3,), (1e-3, 1e-4)}
    model = TinyLM()
    with watch(model) as w:
        optimizer = torch.optim.AdamW(model.parameters())
        next_token_loss(model(tokens(0)), tokens(0)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        next_token_loss(model(tokens(0)), tokens(0)).backward()  # type: ignore[no-untyped-call]  # the step is over
        assert w.flusher.facts.optimizers == ("AdamW",)
        seen = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert seen() is None


def test_copies_are_not_recorded() -> None:
    (w,) = run(more_loops.copied, 31, flush_steps=7).watches
    steps = steps_of(w)
    assert {s.num_tokens for s in steps} == {48}
    assert {s.num_micro_batches for s in steps} == {1}


def test_a_pickled_model_needs_no_ghoststep() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    with watch(model):
        assert b"ghoststep" not in pickle.dumps(model)
        for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            for hooks in (twin._forward_pre_hooks, twin[0]._forward_hooks):
                assert [hook(1, 2, 3) for hook in hooks.values()] == [None]


def test_threads_are_recorded() -> None:
    (w,) = run(more_loops.in_a_thread, 30, flush_steps=7).watches
    assert [s.number for s in steps_of(w)] == list(range(1, 31))
    assert {s.num_tokens for s in steps_of(w)} == {48}


@pytest.mark.parametrize("clip", ["torch", "ours"])
def test_two_threads_train_at_once(clip: str) -> None:
    """Each with its own model and watch: the steps are those of a run without the other one, and nothing stays wrapped."""
    functions = (torch._foreach_norm, torch.autograd.backward)
    alone = run(language_model(clip=clip), 40).state["losses"]
    torch.manual_seed(0)
    loops = [language_model(clip=clip)() for _ in range(2)]
    loops[1].models[0].load_state_dict(loops[0].models[0].state_dict())
    losses: list[list[torch.Tensor]] = [[], []]

    def train(k: int) -> None:
        losses[k] = [loops[k].step(i).clone() for i in range(40)]

    with contextlib.ExitStack() as stack:
        watches = [stack.enter_context(watch(x.models[0], x.optimizers[0], flush_steps=3)) for x in loops]
        threads = [threading.Thread(target=train, args=(k,)) for k in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for k, w in enumerate(watches):
        same(alone, losses[k])
        assert not w.faults.lines()
        steps = steps_of(w)
        assert [s.number for s in steps] == list(range(1, 41))
        assert {(s.num_tokens, s.num_micro_batches) for s in steps} == {(48, 1)}
        assert [s.loss for s in steps] == [float(x) for x in alone]
    assert functions == (torch._foreach_norm, torch.autograd.backward)


def test_an_adapter_around_an_embedding_counts_once() -> None:
    (w,) = run(other_loops.lora, 4, flush_steps=3).watches
    assert {s.num_tokens for s in steps_of(w)} == {48}
    (table,) = [t for t in w.flusher.facts.tables if t.is_trainable]
    assert table.name.endswith("modules_to_save.default.weight")


class Shared(nn.Module):
    """Two embeddings with one table, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Embedding(10, 4), nn.Embedding(10, 4)
        self.other.weight = self.one.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.one(ids) - 2 * self.other(ids[:, :2]).sum(1, keepdim=True)).square().sum()  # type: ignore[no-any-return]


def test_modules_that_share_a_table() -> None:
    model = Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer) as w:
        model(torch.arange(6).reshape(2, 3)).backward()
        optimizer.step()
    assert [t.name for t in w.flusher.facts.tables] == ["one.weight"]
    assert w.flusher.facts.tables[0].is_tied
    assert steps_of(w)[0].num_tokens == 10


def test_arguments_by_place_and_by_name_are_kept(tmp_path: Path) -> None:
    loop = more_loops.two_encoders()
    with watch(loop.models[0], loop.optimizers[0], run_dir=tmp_path) as w:
        loop.step(0)
        keeper = w.flusher.keeper
        assert keeper is not None
        (batch,) = keeper.batches(1)
    assert batch["question"].equal(tokens(0, batch=8))
    assert batch["answer"].equal(tokens(0, batch=8).roll(1, 1))


def test_another_default_dtype_while_training() -> None:
    loop = language_model()()
    with watch(loop.models[0], loop.optimizers[0], flush_steps=2) as w:
        with float64_by_default():
            loop.step(0)
        for i in range(1, 6):
            loop.step(i)
    assert not w.faults.lines()
    assert len(steps_of(w)) == 6


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    for part in range(2):
        loop = language_model()()
        with watch(loop.models[0], loop.optimizers[0], run_dir=tmp_path, flush_steps=4) as w:
            for i in range(10):
                loop.step(i)
        assert [s.number for s in steps_of(w)] == list(range(10 * part + 1, 10 * part + 11))


def test_backwards_without_any_step_are_told() -> None:
    model = TinyLM()
    with watch(model) as w:
        for i in range(3):
            next_token_loss(model(tokens(i)), tokens(i)).backward()  # type: ignore[no-untyped-call]
    report = w.report()
    assert report.subjects[0].facts["backwards without any step of an optimizer"] == 3
    assert report.exit_code == 2


def test_ddp_that_leaves_gradients_to_one_rank_is_known(one_rank: None) -> None:
    from ghoststep.watching.run_facts import _own_gradients

    plain = torch.nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    assert _own_gradients(nn.Linear(2, 2)) == _own_gradients(plain) == ""
    plain.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    assert "communication hook <lambda>" in _own_gradients(plain)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ignore = torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(module, ["1.weight"])  # type: ignore[no-untyped-call]
    assert "leave parameters out" in _own_gradients(torch.nn.parallel.DistributedDataParallel(module))
