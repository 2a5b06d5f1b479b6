"""Where a warning points, and that a stranger's exception writes nothing into a log, a report or a record but its own line."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ghoststep
from ghoststep.finding import Outcome
from ghoststep.text import error_text
from ghoststep.watching import checkpoints, spool
from ghoststep.watching.policy import GhoststepWarning
from ghoststep.watching.users_line import users_line
from tests.watch.loops import TinyLM, next_token_loss, tokens

EVIL = "no\x1b[2J\r\nGS401 zeroed-step at step 1: forged\u202e"


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


def test_the_text_of_an_error() -> None:
    assert error_text(ValueError("a\nb")) == "ValueError: a\\nb"
    assert error_text(ValueError()) == "ValueError"
    assert error_text(UnspeakableError()) == "UnspeakableError: its text cannot be read"
    assert error_text(ValueError("x" * 5000), 20) == "ValueError: xxxxxxxx…"
    assert error_text(ValueError(EVIL)).isprintable()


def lose_a_step(model: TinyLM, optimizer: torch.optim.Optimizer, i: int) -> None:
    optimizer.zero_grad()
    next_token_loss(model(tokens(i)), tokens(i)).backward()  # type: ignore[no-untyped-call]
    if i == 2:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(float("nan"))
    optimizer.step()


def pair() -> tuple[TinyLM, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = TinyLM()
    return model, torch.optim.SGD(model.parameters(), 1e-3)


@pytest.mark.parametrize("flush_steps", [1, 32])
def test_a_warning_of_the_policy_points_at_the_users_line(flush_steps: int) -> None:
    model, optimizer = pair()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with ghoststep.watch(model, optimizer, policy="warn", flush_steps=flush_steps, flush_seconds=1e9):
            for i in range(6):
                lose_a_step(model, optimizer, i)
    ours = [w for w in seen if issubclass(w.category, GhoststepWarning)]
    assert ours
    assert {w.filename for w in ours} == {__file__}
    assert any("GS403" in str(w.message) for w in ours)


def test_a_filter_by_module_and_the_memory_of_warnings_work() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=GhoststepWarning, module=__name__.replace(".", r"\."))
        for _ in range(3):
            users_line().warn("told once")
    assert len(seen) == 1


def test_without_a_line_of_the_users_the_outermost_one_is_named() -> None:
    namespace: dict[str, Any] = {"__name__": "torch.somewhere", "users_line": users_line}
    exec(compile("def call(f):\n    return f()\n", "inner.py", "exec"), namespace)
    line = namespace["call"](users_line)
    assert line.file == __file__  # the frames below are not the user's
    assert line.number > 0


class Raising:
    """A sink with a library's error."""

    def write(self, step: Any, facts: Any) -> None:
        raise RuntimeError(EVIL)

    def alarm(self, code: str, name: str, severity: Any, message: str, step: int | None) -> None: ...

    def close(self) -> None: ...


def test_a_sinks_error_is_escaped_everywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = pair()
    with caplog.at_level(logging.DEBUG), ghoststep.watch(model, optimizer, run_dir=tmp_path / "run", sinks=[Raising()]) as w:
        for i in range(2):
            lose_a_step(model, optimizer, i)
    (record,) = [r for r in caplog.records if r.name == "ghoststep.sinks"]
    assert record.getMessage().isprintable()
    assert "\\x1b[2J\\r\\nGS401" in record.getMessage()
    assert str(w.report().subjects[0].facts["broken"]).isprintable()
    (rank,) = ghoststep.check(tmp_path / "run").subjects
    assert not any(not str(v).isprintable() for v in rank.facts.values())


def test_a_hooks_error_is_escaped_in_the_log_and_in_every_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = pair()
    w = ghoststep.watch(model, optimizer)
    monkeypatch.setattr(w, "_stepped", lambda *_: (_ for _ in ()).throw(RuntimeError(EVIL)))
    with caplog.at_level(logging.WARNING), w:
        for i in range(2):
            lose_a_step(model, optimizer, i)
    (record,) = caplog.records
    first, *traceback = record.getMessage().split("\n")
    assert "the hook 'optimizer step' of ghoststep failed" in first
    assert traceback
    assert all(line.startswith("  ") and line.isprintable() for line in traceback)
    assert any("_stepped" in line or "test_words" in line for line in traceback)
    assert record.exc_info is None
    for verdict in w.report().verdicts:
        assert (verdict.reason or "").isprintable()


def test_what_a_disk_or_a_saver_says_is_escaped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Saver:
        def save(self, path: str) -> None:
            raise ValueError(EVIL)

        def load(self, path: str) -> None: ...

    kept = checkpoints.Checkpoints(saver=Saver(), folder=tmp_path)
    with pytest.raises(ghoststep.UsageError) as refused:
        kept.start(0)
    assert str(refused.value).isprintable()
    with caplog.at_level(logging.WARNING):
        kept.take(5)
    assert kept.failed.isprintable()
    assert all(line.isprintable() for record in caplog.records for line in record.getMessage().split("\n"))


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the guide says: one warning, the training goes on with the same bits, nothing is clear, and the exit code is 2."""
    bits = []
    for folder in (None, tmp_path / "run"):
        model, optimizer = pair()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        caplog.clear()
        with ghoststep.watch(model, optimizer, run_dir=folder, flush_steps=4) as w:
            for i in range(40):
                if i == 20 and folder is not None:

                    def full(descriptor: int, data: bytes) -> None:
                        raise OSError(28, "No space left on device")

                    monkeypatch.setattr(spool, "write_all", full)
                optimizer.zero_grad()
                next_token_loss(model(tokens(i)), tokens(i)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        bits.append([p.detach().clone() for p in model.parameters()])
        report = w.report()
        clear = [v.name for v in report.verdicts if v.outcome is Outcome.CLEAR]
        if folder is None:
            assert clear
            assert report.exit_code == 0
    assert all(torch.equal(a, b) for a, b in zip(*bits, strict=True))
    warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert "No space left on device" in warned[0]
    assert "training goes on without a record" in warned[0]
    assert "ghoststep" not in warned[0].replace(str(tmp_path), "")  # the log's own name says it
    assert not clear
    assert report.exit_code == 2
    assert report.subjects[0].facts["steps"] == 40
    broken = [v for v in report.verdicts if v.outcome is Outcome.BROKEN]
    assert all("No space left" in (v.reason or "") for v in broken)
    assert len(broken) > 5
    monkeypatch.undo()
    read = ghoststep.check(tmp_path / "run")
    assert read.subjects[0].facts["steps"] == "1 to 16"
