"""Parameters that a real loop does not train, live and in the record, and everything that looks like it and is healthy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ghoststep
from ghoststep.evidence.steps import RunFacts
from ghoststep.finding import Finding, Outcome, Severity
from ghoststep.run_folder import encode_manifest
from ghoststep.watching import spool
from ghoststep.watching.untrained import Untrained
from tests.watch.healthy_loops import HEALTHY
from tests.watch.loops import Loop, TinyLM, next_token_loss, run, tokens, watch

NUM_STEPS = 100
CODE = "GS421"


def loop(
    model: TinyLM, *optimizers: Any, stepped: int = 9, forward: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[int], None] | None = None,
) -> Loop:  # fmt: skip
    """stepped: how many of the optimizers are stepped. after: called at the end of each step."""

    def step(i: int) -> Tensor:
        for o in optimizers:
            o.zero_grad()
        ids = tokens(i)
        loss = next_token_loss((forward or model)(ids), ids)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in optimizers[:stepped]:
            o.step()
        if after is not None:
            after(i)
        return loss

    return Loop(models=[model], optimizers=[list(optimizers)], step=step)


def adam(*parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for part in parameters for p in part], lr=1e-3)


def trunk(model: TinyLM) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if not n.startswith("head")]


def old_head() -> Loop:
    model = TinyLM()
    optimizer = adam(model.parameters())
    model.head = nn.Linear(32, 64, bias=False)
    return loop(model, optimizer)


def idle() -> Loop:
    model = TinyLM()
    return loop(model, adam(trunk(model)), adam(model.head.parameters()), stepped=1)


def probing() -> Loop:
    model = TinyLM()
    return loop(model, adam(model.head.parameters()))


def detached() -> Loop:
    model = TinyLM()
    return loop(model, adam(model.parameters()), forward=lambda ids: model.head(model.hidden(ids).detach()))


def closed_gate(*, until: int = 20, again: int = 10_000, weight: float = 0.0) -> Loop:
    """The first block is behind a gate that closes after some steps, and may open again."""
    model, seen = TinyLM(), [0]

    def forward(ids: Tensor) -> Tensor:
        seen[0] += 1
        x = model.embed(ids)
        gate = 1.0 if seen[0] <= until or seen[0] >= again else weight
        logits: Tensor = model.head(model.norm(model.blocks[1](x + gate * model.blocks[0](x))))
        return logits

    return loop(model, adam(model.parameters()), forward=forward)


def never_open() -> Loop:
    return closed_gate(until=0)


BROKEN: dict[str, tuple[Callable[[], Loop], Severity, str, str]] = {
    "the optimizer is older than the head": (
        old_head, Severity.WARNING, "head.weight",
        "1 trainable parameter (head.weight) is held by no optimizer that has stepped, so that no step changes it; its gradients are "
        "computed and thrown away. The optimizer holds 1 trainable tensor that is not in this model",
    ),
    "the second optimizer never steps": (
        idle, Severity.NOTE, "head.weight", "It is in an optimizer whose step() was never called: call it in the loop.",
    ),
    "only the head was given": (
        probing, Severity.NOTE, "embed.weight",
        "27 trainable parameters (embed.weight, blocks.0.norm_1.weight, blocks.0.norm_1.bias and 24 more)",
    ),
    "a trunk cut off": (detached, Severity.NOTE, "embed.weight", "in the optimizer and never had a gradient"),
    "a gate that closes": (
        closed_gate, Severity.NOTE, "blocks.0.norm_1.weight", "(last one that was not zero: step 20, step 20, step 20)",
    ),
    "a gate that was never open": (never_open, Severity.NOTE, "blocks.0.norm_1.weight", "(and never another one)"),
}  # fmt: skip


def told(make: Callable[[], Loop], folder: Path, num_steps: int = NUM_STEPS) -> tuple[list[Finding], Outcome]:
    """What the report says; told once while training, and the same in the record."""
    (w,) = run(make, num_steps, folder, flush_steps=16).watches
    assert not w.faults.lines()
    said, again = w.report().verdict(CODE), ghoststep.check(folder / "run0", select=[CODE]).verdict(CODE)
    assert [f.message for f in said.findings] == [f.message for f in again.findings]
    assert said.outcome is again.outcome
    assert len([a for a in w.flusher.alarms if a.code == CODE]) == len(said.findings)
    return list(said.findings), said.outcome


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_trained_is_told_once(name: str, tmp_path: Path) -> None:
    make, severity, parameter, text = BROKEN[name]
    (finding,), _ = told(make, tmp_path)
    assert text in finding.message
    assert (finding.severity or Severity.NOTE, finding.where.parameter) == (severity, parameter)


def joint() -> Loop:
    """One optimizer for two models, of which one is watched; a tensor of the other one has no gradient before the tenth step."""
    model, other, late = TinyLM(), nn.Linear(64, 64), nn.Parameter(torch.zeros(64))
    seen = [0]

    def forward(ids: Tensor) -> Tensor:
        seen[0] += 1
        logits: Tensor = other(model(ids))
        return logits + late if seen[0] >= 10 else logits

    return loop(model, adam(model.parameters(), other.parameters(), [late]), forward=forward)


def in_turn() -> Loop:
    """A second optimizer that steps every tenth step, on the gradients of all ten."""
    model = TinyLM()
    head = adam(model.head.parameters())

    def after(i: int) -> None:
        if i % 10 == 9:
            head.step()
            head.zero_grad()

    return loop(model, adam(trunk(model)), after=after)


def two_in_turn() -> Loop:
    """Two optimizers that share one backward's model and step in turn, in phases of 20 steps."""
    model = TinyLM()
    both = [adam(trunk(model)), adam(model.head.parameters())]

    def step(i: int) -> Tensor:
        model.zero_grad()
        ids = tokens(i)
        loss = next_token_loss(model(ids), ids)
        loss.backward()  # type: ignore[no-untyped-call]
        both[i // 20 % 2].step()
        return loss

    return Loop(models=[model], optimizers=[list(both)], step=step)


def frozen() -> Loop:
    model = TinyLM()
    for p in trunk(model):
        p.requires_grad_(False)
    return loop(model, adam(model.head.parameters()))


def features() -> Loop:
    """A trunk that only makes features: no gradient, no optimizer."""
    model = TinyLM()
    return loop(model, adam(model.head.parameters()), forward=lambda ids: model.head(model.hidden(ids).detach()))


def frozen_later() -> Loop:
    """A block is frozen after 20 steps, and its gradients are gone from then on."""
    model = TinyLM()

    def after(i: int) -> None:
        if i == 20:
            model.blocks[0].requires_grad_(False)

    return loop(model, adam(model.parameters()), after=after)


def rare() -> Loop:
    """A block that every eighth batch uses."""
    model, seen = TinyLM(), [0]

    def forward(ids: Tensor) -> Tensor:
        seen[0] += 1
        x = model.embed(ids)
        x = model.blocks[0](x) if seen[0] % 8 == 0 else x
        logits: Tensor = model.head(model.norm(model.blocks[1](x)))
        return logits

    return loop(model, adam(model.parameters()), forward=forward)


def nothing_learned() -> Loop:
    """After 20 steps every gradient of every parameter is zero, as with equal rewards: no single one is to blame."""
    model, seen = TinyLM(), [0]

    def forward(ids: Tensor) -> Tensor:
        seen[0] += 1
        logits: Tensor = model(ids)
        return logits if not 20 < seen[0] <= 90 else logits * 0

    return loop(model, adam(model.parameters()), forward=forward)


HEALTHY_TWINS: dict[str, Callable[[], Loop]] = {
    "one optimizer": lambda: loop(model := TinyLM(), adam(model.parameters())),
    "two optimizers": lambda: loop(model := TinyLM(), adam(trunk(model)), adam(model.head.parameters())),
    "tied": lambda: loop(model := TinyLM(tied=True), adam(model.parameters())),
    "an optimizer for two models": joint,
    "a second optimizer every tenth step": in_turn,
    "two in turn": two_in_turn,
    "a frozen trunk": frozen,
    "features": features,
    "frozen later": frozen_later,
    "a block that few batches use": rare,
    "a gate that is open a little": lambda: closed_gate(weight=1e-3),
    "nothing learned for 70 steps": nothing_learned,
}


@pytest.mark.parametrize("name", HEALTHY_TWINS)
def test_look_alikes_are_clear(name: str, tmp_path: Path) -> None:
    num_steps = 160 if name == "nothing learned for 70 steps" else NUM_STEPS
    assert told(HEALTHY_TWINS[name], tmp_path, num_steps) == ([], Outcome.CLEAR)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_have_no_note(name: str) -> None:
    for w in run(HEALTHY[name], NUM_STEPS, flush_steps=16).watches:
        assert [f.message for f in w.report().verdict(CODE).findings] == []


def test_few_steps_are_no_proof(tmp_path: Path) -> None:
    assert told(old_head, tmp_path / "a", 63) == ([], Outcome.UNKNOWN)
    assert told(old_head, tmp_path / "b", 64)[1] is Outcome.FOUND


def test_an_optimizer_that_watch_was_not_told_of(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = idle()
    with watch(made.models[0], run_dir=tmp_path / "run", flush_steps=16) as w:
        for i in range(NUM_STEPS):
            made.step(i)
    (finding,) = w.report().verdict(CODE).findings
    assert "give it to an optimizer and step it" in finding.message


def test_a_gate_that_opens_again_was_told_and_is_trained_in_the_end(tmp_path: Path) -> None:
    (w,) = run(lambda: closed_gate(again=90), NUM_STEPS, tmp_path, flush_steps=8).watches
    assert len([a for a in w.flusher.alarms if a.code == CODE]) == 1
    assert ghoststep.check(tmp_path / "run0", select=[CODE]).verdict(CODE).outcome is Outcome.CLEAR


def test_a_pause_is_judged_by_those_before() -> None:
    """A part that is used in one step of 40: 64 steps and more without it are as ever, four times 40 are not."""
    model, seen = TinyLM(), [0]

    def forward(ids: Tensor) -> Tensor:
        seen[0] += 1
        x = model.embed(ids)
        x = model.blocks[0](x) if seen[0] in (1, 41, 81) else x
        logits: Tensor = model.head(model.norm(model.blocks[1](x)))
        return logits

    made = loop(model, adam(model.parameters()), forward=forward)
    with watch(model, made.optimizers[0], flush_steps=8) as w:
        for i in range(81 + 150):
            made.step(i)
        assert w.report().verdict(CODE).outcome is Outcome.CLEAR
        for i in range(20):
            made.step(i)
        (finding,) = w.report().verdict(CODE).findings
    assert "step 81" in finding.message


def test_a_head_replaced_while_watched_is_not_told_of_as_silent() -> None:
    """The watch says that a part is in no norm; the old one is not in the model any more."""
    model = TinyLM()
    optimizer = adam(model.parameters())
    made = loop(model, optimizer)
    with watch(model, optimizer, flush_steps=8) as w:
        for i in range(20):
            made.step(i)
        model.head = nn.Linear(32, 64, bias=False)
        optimizer.add_param_group({"params": list(model.head.parameters())})
        for i in range(NUM_STEPS):
            made.step(i)
    said = w.report().verdict(CODE)
    assert said.outcome is Outcome.CLEAR
    assert "head.weight" in str(said.reason)


def test_the_record_is_written_anew_only_when_something_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[RunFacts] = []

    def encode(facts: RunFacts) -> bytes:
        written.append(facts)
        return encode_manifest(facts)

    monkeypatch.setattr(spool, "encode_manifest", encode)
    model = TinyLM()
    made = loop(model, adam(model.parameters()))
    with watch(model, made.optimizers[0], run_dir=tmp_path / "run", flush_steps=4):
        for i in range(60):
            made.step(i)
        before = len(written)
        for i in range(60):
            made.step(i)
    assert len(written) <= before + 1, "once, when 64 steps are over"


def test_a_fault_of_ours_is_broken_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("ours")

    bare = run(old_head, 40)
    monkeypatch.setattr(Untrained, "stepped", fail)
    ran = run(old_head, 40, flush_steps=16)
    assert ran.watches[0].faults.lines() == ("untrained parameters: RuntimeError: ours",)
    assert [float(a) for a in bare.state["losses"]] == [float(b) for b in ran.state["losses"]]
    assert len(ran.watches[0].flusher.kept) == 40
