"""A sink that fails is closed and told once; nothing reaches the training, nor the other sinks."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from ghoststep.errors import UsageError
from ghoststep.evidence.steps import RunFacts, Step
from ghoststep.finding import Severity
from ghoststep.sinks import Sinks, open_sink
from tests.sinks.made_up import FACTS, ON_RANK_1, run


class Kept:
    """A sink of the user's: three methods and nothing else."""

    def __init__(self, fails_in: str = "", error: BaseException | None = None) -> None:
        self.calls: list[Any] = []
        self._fails_in, self._error = fails_in, error or RuntimeError("no")

    def _told(self, what: str, value: Any) -> None:
        self.calls.append((what, value))
        if what == self._fails_in:
            raise self._error

    def write(self, step: Step, facts: RunFacts) -> None:
        self._told("write", step.number)

    def alarm(self, code: str, name: str, severity: Severity, message: str, step: int | None) -> None:
        self._told("alarm", (code, severity, step))

    def close(self) -> None:
        self._told("close", None)


class OfRank0(Kept):
    every_rank = False


class Flushed(Kept):
    def flush(self) -> None:
        self._told("flush", None)


def a_whole_run(sinks: Sinks, facts: RunFacts = FACTS) -> None:
    sinks.write(run(3), facts)
    sinks.alarm("GS401", "zeroed-step", Severity.ERROR, "told", 2)
    sinks.flush()
    sinks.write(run(2), facts)
    sinks.close()
    sinks.close()


WHOLE = [
    *[("write", n) for n in (1, 2, 3)],
    ("alarm", ("GS401", Severity.ERROR, 2)),
    ("write", 1),
    ("write", 2),
    ("close", None),
]


def test_steps_alarms_and_one_close() -> None:
    sink = Kept()
    sinks = Sinks([sink])
    assert sinks
    a_whole_run(sinks)
    assert sink.calls == WHOLE
    assert not Sinks()
    assert not sinks.broken


def test_flush_is_optional() -> None:
    sink = Flushed()
    a_whole_run(Sinks([sink]))
    assert [what for what, _ in sink.calls] == ["write"] * 3 + ["alarm", "flush", "write", "write", "close"]


@pytest.mark.parametrize("where", ["write", "alarm", "flush", "close"])
def test_a_sink_that_raises_is_closed_with_one_warning(where: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Flushed(where), Kept()
    with caplog.at_level(logging.WARNING, logger="ghoststep.sinks"):
        sinks = Sinks([bad, good])
        a_whole_run(sinks)
    assert good.calls == WHOLE
    assert len(caplog.records) == 1
    assert f"Flushed.{where}: RuntimeError: no" in caplog.text
    assert sinks.broken == [f"Flushed.{where}: RuntimeError: no"]
    whats = [what for what, _ in bad.calls]
    assert whats.count(where) == 1
    assert whats.count("close") == 1
    assert whats[-1] == "close"


def test_a_failing_close_of_a_failed_sink_is_no_second_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Twice(Kept):
        def close(self) -> None:
            raise OSError("gone")

    a_whole_run(Sinks([Twice("write")]))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_ctrl_c_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        Sinks([Kept("write", KeyboardInterrupt())]).write(run(1), FACTS)


def test_a_sink_may_ask_for_rank_0_only() -> None:
    everywhere, first = Kept(), OfRank0()
    a_whole_run(Sinks([everywhere, first]), ON_RANK_1)
    assert everywhere.calls == WHOLE
    assert first.calls == [("close", None)]
    first = OfRank0()
    a_whole_run(Sinks([first]), FACTS)
    assert first.calls == WHOLE


def test_random_numbers_stay_as_they_were() -> None:
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")

    class Draws(Kept):
        def _told(self, what: str, value: Any) -> None:
            self.drawn = random.random(), np.random.rand(), torch.rand(1).item()

    def state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state().tolist()

    sink, before = Draws(), state()
    a_whole_run(Sinks([sink]))
    assert state() == before
    assert sink.drawn[0] == random.random()  # it did draw


def test_what_is_no_sink_is_refused_and_what_was_opened_is_closed() -> None:
    sink = Kept()
    with pytest.raises(UsageError, match="write, alarm and close"):
        Sinks([sink, object()])  # type: ignore[list-item]
    assert sink.calls == [("close", None)]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nothing:x", r"no sink 'nothing'; known are jsonl:PATH, tensorboard:FOLDER, wandb"),
        ("", "no sink ''"),
        ("jsonl", "needs a path: jsonl:PATH"),
        ("tensorboard:", "needs a folder: tensorboard:FOLDER"),
        ("prometheus:http", "port from 1 to 65535"),
        ("prometheus:0", "port from 1 to 65535"),
        ("prometheus:65536", "port from 1 to 65535"),
        ("prometheus:localhost:²", "port from 1 to 65535"),
    ],
)
def test_a_wrong_spec_is_refused_at_once(spec: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_sink(spec)
    with pytest.raises(UsageError, match=said):
        Sinks(spec)


@pytest.mark.parametrize(
    ("spec", "module", "package"),
    [
        ("tensorboard:x", "torch.utils.tensorboard", "tensorboard"),
        ("wandb", "wandb", "wandb"),
        ("mlflow", "mlflow", "mlflow"),
        ("trackio", "trackio", "trackio"),
        ("prometheus:9464", "prometheus_client", "prometheus-client"),
    ],
)
def test_a_missing_library_is_named(spec: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"needs the package {package} .*pip install {package}"):
        open_sink(spec)
