"""GS421 on small records: kinds, wording, ranks, hostile facts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ghoststep.answers import Answer, Clear, Found, Unknown
from ghoststep.checks.steps.untrained_parameters import untrained_parameters
from ghoststep.evidence.steps import QUIET_STEPS, StepOutcome, UntrainedFacts
from ghoststep.finding import Finding, Severity
from ghoststep.watching.newcomers import Newcomers
from ghoststep.watching.ring import WIDTH, Flushed, HostFacts
from ghoststep.watching.untrained import Untrained
from tests.checks.run_builders import healthy, record, run, step


def judged(facts: UntrainedFacts | None, num_steps: int = 80, **more: Any) -> Answer:
    return untrained_parameters(run(healthy(num_steps), untrained=facts, **more))


def findings(answer: Answer) -> tuple[Finding, ...]:
    assert isinstance(answer, Found)
    return answer.findings


HELD = UntrainedFacts()
HEAD = UntrainedFacts(unheld=("head.weight", "head.bias"), num_unheld=2, num_unheld_alive=2)


class TestCheck:
    def test_nothing_is_untrained(self) -> None:
        assert isinstance(judged(HELD), Clear)

    def test_not_looked_at(self) -> None:
        few, old, sharded = judged(None, 63), judged(None), judged(None, parallelism="FSDP2", world_size=2)
        assert isinstance(few, Unknown)
        assert few.reason == "63 steps recorded; 64 are needed"
        assert isinstance(old, Unknown)
        assert "earlier version" in old.reason
        assert isinstance(sharded, Unknown)
        assert "sharded (FSDP2)" in sharded.reason
        assert isinstance(untrained_parameters(run([], untrained=HELD)), Unknown)

    def test_one_finding_a_kind(self) -> None:
        facts = UntrainedFacts(
            unheld=("a",), num_unheld=1, num_unheld_alive=1, absent=("b", "c"), num_absent=2, still=("d", "e"), num_still=2,
            still_since=(12, 0),
        )  # fmt: skip
        unheld, absent, still = findings(judged(facts))
        assert [f.where.parameter for f in (unheld, absent, still)] == ["a", "b", "d"]
        assert "(a) is held by no optimizer that has stepped, so that no step changes it; its gradients" in unheld.message
        assert "2 trainable parameters (b, c) are in the optimizer and never had a gradient" in absent.message
        assert "step 12, never" in still.message
        assert all("{" not in f.message for f in (unheld, absent, still))

    def test_only_strange_tensors_beside_gradients_are_a_warning(self) -> None:
        strange = UntrainedFacts(unheld=("a",), num_unheld=1, num_unheld_alive=1, num_strange=2)
        (warning,) = findings(judged(strange))
        assert (warning.severity, "2 trainable tensors that are not in" in warning.message) == (Severity.WARNING, True)
        (note,) = findings(judged(HEAD))
        assert note.severity is None
        without = UntrainedFacts(unheld=("a",), num_unheld=1, num_idle=1, num_strange=2)
        (note,) = findings(judged(without))
        assert note.severity is None
        assert "It is in an optimizer whose step() was never called" in note.message
        assert "thrown away" not in note.message

    def test_parts_are_counted(self) -> None:
        (note,) = findings(judged(UntrainedFacts(unheld=("a",) * 8, num_unheld=30, num_unheld_alive=4, num_idle=28)))
        assert "30 trainable parameters (a, a, a and 27 more)" in note.message
        assert "4 of their gradients" in note.message
        assert "28 of them are in an optimizer whose step()" in note.message

    def test_ranks_that_say_the_same_are_told_once(self) -> None:
        many = [record(healthy(80), i, world_size=2, parallelism="DDP", untrained=HEAD) for i in range(2)]
        (note,) = findings(untrained_parameters(run(*many)))
        assert note.where.rank == 0
        other = record(healthy(80), 1, world_size=2, parallelism="DDP", untrained=UntrainedFacts(absent=("z",), num_absent=1))
        assert len(findings(untrained_parameters(run(many[0], other)))) == 2

    def test_a_rank_that_was_not_looked_at_is_not_clear(self) -> None:
        seen = record(healthy(80), 0, world_size=2, parallelism="DDP", untrained=HELD)
        short = record(healthy(20), 1, world_size=2, parallelism="DDP")
        said = untrained_parameters(run(seen, short))
        assert isinstance(said, Unknown)
        assert "20 steps recorded; 64 are needed (on 1 of 2 ranks)" in said.reason

    def test_facts_of_a_stranger(self) -> None:
        facts = UntrainedFacts(unheld=("a\x1b[31m{them}",), num_unheld=1, num_unheld_alive=1, num_absent=3, num_still=-1)
        for f in findings(judged(facts)):
            assert "\x1b" not in f.message


def flushed(rows: list[list[float]]) -> Flushed:
    before = torch.tensor(rows)
    host = [HostFacts(number=i, ended_at=0.0, seconds=None) for i in range(len(rows))]
    return Flushed(before=before, after=before, more=torch.zeros(len(rows), WIDTH), host=host)


def remembered(rows: list[list[float]], size: int, *, outcomes: dict[int, StepOutcome] | None = None) -> UntrainedFacts | None:
    """What is told of a model whose parameters a, b, ... have these norms, step by step."""
    model = torch.nn.ParameterDict({c: torch.nn.Parameter(torch.zeros(1)) for c in "abcdef"[: len(rows[0])]})
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    watched = Untrained(list(model), parameters, Newcomers(model, parameters, is_swapping=False), [optimizer])
    watched.stepped(optimizer, list(range(len(parameters))))
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        outcome = [(outcomes or {}).get(start + i + 1, StepOutcome.STEPPED) for i in range(len(part))]
        steps = [step(start + i + 1, outcome=outcome[i]) for i in range(len(part))]
        watched.learned(flushed(part), steps)
    return watched.facts()


class TestMemory:
    def test_the_same_whatever_the_size_of_a_flush(self) -> None:
        chance = np.random.default_rng(0)
        rows = [[1.0, *((-1.0, 0.0, 2.0)[chance.integers(0, 3)] for _ in range(2)), 0.0, -1.0] for _ in range(100)]
        for row in rows[30:]:
            row[1] = 0.0
        last = max(i + 1 for i, r in enumerate(rows) if r[1] > 0)
        for size in (1, 7, 32, 100):
            facts = remembered(rows, size)
            assert facts == UntrainedFacts(
                absent=("e",), num_absent=1, still=("d", "b"), num_still=2, still_since=(0, last)
            )  # fmt: skip

    def test_a_gradient_that_is_nan_is_one(self) -> None:
        assert remembered([[1.0, math.nan]] * 80, 16) == UntrainedFacts()

    def test_steps_in_which_nothing_learned_do_not_count(self) -> None:
        assert remembered([[1.0, 1.0]] + [[0.0, 0.0]] * 200, 16) is None
        half = [[1.0, 1.0]] + [[0.0, 0.0], [1.0, 0.0]] * (QUIET_STEPS - 1)
        assert remembered(half, 16) == UntrainedFacts()
        found = remembered([*half, [1.0, 0.0]], 16)
        assert found is not None
        assert found.still == ("b",)

    def test_skipped_steps_do_not_count(self) -> None:
        rows = [[1.0, 1.0]] * 10 + [[math.inf, 0.0]] * 70
        skipped = dict.fromkeys(range(11, 81), StepOutcome.SKIPPED_BY_SCALER)
        assert remembered(rows, 16, outcomes=skipped) is None
        found = remembered(rows, 16)
        assert found is not None
        assert found.still == ("b",)
