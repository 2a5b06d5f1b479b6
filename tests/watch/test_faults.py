"""A fault in any part of ours: training goes on with the same bits, and the report says what broke. Nothing is then clear."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ghoststep.finding import Outcome
from ghoststep.watching import (
    building,
    flushing,
    forensics,
    judge,
    measure,
    policy,
    recorder,
    reporting,
    ring,
    seams,
    spool,
    strict,
)
from ghoststep.watching.guarded import Faults
from tests.watch.loops import Loop, Ran, Watch, run, same, tokens
from tests.watch.more_loops import spiking

NUM_STEPS = 14


class Tokenizer:
    def decode(self, ids: list[int], **_: Any) -> str:
        return f"<{ids[0]}>"


class Sink:
    every_rank = True

    def write(self, step: Any, facts: Any) -> None: ...

    def alarm(self, code: str, name: str, severity: Any, message: str, step: int | None) -> None: ...

    def close(self) -> None: ...


class BadSink(Sink):
    def write(self, step: Any, facts: Any) -> None:
        raise RuntimeError("planted")


def each(w: Watch, i: int) -> None:
    w.step(batch={"ids": tokens(i)})
    if i % 6 == 5:
        w.flush()


STRICT = {"policy": {"GS401": "skip-step", "GS4": "warn"}, "strict": True}
LOST, CAUGHT, CALM = spiking("torch", scaled=False), spiking("ours"), spiking("torch", spikes=())

HOOKS: dict[str, tuple[Callable[[], Loop], dict[str, Any]]] = {
    "forward": (CALM, {}),
    "embedding": (CALM, {}),
    "embedding gradient": (CALM, {}),
    "before backward": (CALM, {}),
    "after backward": (CALM, {}),
    "scaler": (CALM, {}),
    "scaler step": (CALM, {}),
    "clip": (CALM, {}),
    "clip norms": (spiking("torch", spikes=(), scaled=False), {}),
    "clip event": (CAUGHT, {}),
    "optimizer step": (CALM, {}),
    "skipped step": (LOST, STRICT),
    "strict gate": (LOST, STRICT),
    "flush": (CALM, {}),
    "closing": (CALM, {}),
    "closing the record": (CALM, {}),
    "batch": (CALM, {}),
    "recorder": (CALM, {}),
    "recording": (CALM, {}),
    "sinks": (CALM, {}),
    "judging": (CALM, {}),
    "telling an alarm": (LOST, {}),
    "policy": (CALM, {}),
    "decoding tokens": (CALM, {}),
    "keeping a batch": (LOST, {}),
    "untrained parameters": (CALM, {}),
}
"""Hook → a loop that calls it, and wishes."""

KEPT = {"strict step", "strict gate", "optimizer", "report"}
"""Faults that are kept without a guard of their own: see `PARTS`."""


def test_every_hook_is_here() -> None:
    """A new hook has to be added to the table, so that it is tried."""
    folder = Path(building.__file__).parent
    source = "\n".join(p.read_text() for p in sorted(folder.glob("*.py")))
    found = set(re.findall(r"(?:\bguarded|\b_do)\(\s*\"([^\"]+)\"", source))
    assert found == set(HOOKS)
    assert set(re.findall(r"\bkeep\(\s*\"([^\"]+)\"", source)) == KEPT


def reported(ran: Ran, expected: str, *, hides: bool) -> None:
    """The report says it, and no verdict is clear if something may have been missed."""
    (w,) = ran.watches
    report = w.report()
    (subject,) = report.subjects
    assert expected in str(subject.facts["broken"])
    found_error = any(v.outcome is Outcome.FOUND and v.severity.value == "error" for v in report.verdicts)
    assert report.exit_code == (1 if found_error else 2)
    if hides:
        assert all(v.outcome is not Outcome.CLEAR for v in report.verdicts)


@pytest.mark.parametrize("when", ["at once", "later", "half done"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_fails(hook: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, wishes = HOOKS[hook]
    wishes = {"tokenizer": Tokenizer(), "sinks": [Sink()], "flush_steps": 3, **wishes}
    # Skipping is the user's own wish: what must not change is what a sound watch does.
    expected = run(make, NUM_STEPS, tmp_path / "sound", each=each, **wishes) if "strict" in wishes else run(make, NUM_STEPS)
    guarded, num_calls = Faults.guarded, 0

    def planted(self: Faults, name: str, function: Callable[..., Any]) -> Callable[..., None]:
        def failing(*args: Any, **kwargs: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if when == "half done" or (when == "later" and num_calls < 4 and hook not in RARE):
                function(*args, **kwargs)
                if when == "later":
                    return
            raise RuntimeError("planted")

        return guarded(self, name, failing if name == hook else function)

    monkeypatch.setattr(Faults, "guarded", planted)
    watched = run(make, NUM_STEPS, tmp_path / "run", each=each, **wishes)
    same(expected.state, watched.state)
    assert num_calls
    reported(watched, f"{hook}: RuntimeError: planted", hides=f"{hook}: " not in flushing.BESIDE)


RARE = {
    "clip event",
    "skipped step",
    "strict gate",
    "flush",
    "closing",
    "closing the record",
    "telling an alarm",
    "keeping a batch",
}
"""Called less than four times in these loops."""


def _raise(error: BaseException) -> Callable[..., Any]:
    def raising(*args: Any, **kwargs: Any) -> Any:
        raise error

    return raising


PLANTED = RuntimeError("planted")
PARTS: dict[str, tuple[Any, str, Any, str, dict[str, Any]]] = {
    "places": (seams, "largest_places", PLANTED, "embedding gradient", {}),
    "norms": (measure.TensorNorms, "of", PLANTED, "after backward", {}),
    "versions": (measure.TensorNorms, "versions", PLANTED, "backward", {}),
    "sample": (measure.WeightSample, "take", PLANTED, "after backward", {}),
    "row norms": (building, "row_norms", PLANTED, "optimizer step", {}),
    "graph nodes": (building, "_count_nodes", PLANTED, "before backward", {}),
    "ring": (ring.Ring, "put", PLANTED, "forward", {}),
    "copy": (ring.Ring, "flush", PLANTED, "forward", {}),
    "recorder": (recorder.Recorder, "steps", PLANTED, "recorder", {}),
    "disk full": (spool, "write_all", OSError(errno.ENOSPC, "No space left on device"), "No space left", {}),
    "spool": (spool.Spool, "write", PLANTED, "recording", {}),
    "judge": (judge.Judge, "look", PLANTED, "judging", {}),
    "diagnosis": (judge, "diagnose", PLANTED, "", {}),
    "policy": (policy.Policy, "act", PLANTED, "policy", {}),
    "keeper": (forensics.BatchKeeper, "keep", PLANTED, "batch", {}),
    "keeper's file": (forensics, "_write", OSError(errno.ENOSPC, "No space left on device"), "No space left", {}),
    "tokens": (flushing, "decode_tokens", PLANTED, "decoding tokens", {}),
    "strict step": (strict.Decider, "decide", PLANTED, "strict step", STRICT),
    "verdicts": (judge.Judge, "verdicts", PLANTED, "report", {}),
    "exit": (spool.Spool, "close", PLANTED, "closing the record", {}),
    "sink": (BadSink, "write", PLANTED, "BadSink.write", {"sinks": [BadSink()]}),
}
"""A function of ours, what it raises, what the report says, wishes."""


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_fails(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, error, expected, wishes = PARTS[part]
    bare = run(LOST, NUM_STEPS)

    def later(w: Watch, i: int) -> None:
        if i == 0:
            monkeypatch.setattr(owner, name, _raise(error))

    wishes = {"tokenizer": Tokenizer(), "flush_steps": 3, **wishes}
    watched = run(LOST, NUM_STEPS, tmp_path, each=later, **wishes)
    same(bare.state, watched.state)
    if part == "diagnosis":
        assert watched.watches[0].report().exit_code in (1, 2)
    else:
        reported(watched, expected, hides=part not in ("tokens", "keeper", "keeper's file", "sink"))


def test_an_optimizer_that_we_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = run(CALM, NUM_STEPS)

    def later(w: Watch, i: int) -> None:
        if i == 5:
            monkeypatch.setattr(w, "_indices_of", _raise(PLANTED))

    watched = run(CALM, NUM_STEPS, each=later, flush_steps=3)
    same(bare.state, watched.state)
    reported(watched, "optimizer: RuntimeError", hides=True)


def test_a_sound_watch_is_clear(tmp_path: Path) -> None:
    """The same loops and wishes without a planted fault."""
    for make, expected in ((CALM, 0), (LOST, 1)):
        (w,) = run(make, NUM_STEPS, tmp_path / str(expected), each=each, tokenizer=Tokenizer(), flush_steps=3).watches
        report = w.report()
        assert "broken" not in report.subjects[0].facts
        assert report.exit_code == expected, [v for v in report.verdicts if v.outcome is Outcome.FOUND]
        assert any(v.outcome is Outcome.CLEAR for v in report.verdicts)
    assert reporting.report is not None
