"""A kept batch is run again in the form that a setup takes, however the loop fed it; where it cannot be, that is said."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ghoststep.errors import UsageError
from ghoststep.subjects.setup import make_setup
from ghoststep.watching.replay import kept_steps, load_batches, replay
from ghoststep.watching.watch import watch
from tests.cli.test_check import run, run_program
from tests.watch import replay_setups
from tests.watch.loops import TinyLM, next_token_loss, tokens

BAD = 5
"""The step whose batch holds a NaN."""


def trained(
    folder: Path,
    feed: Callable[[Any, Any, Any], torch.Tensor],
    *,
    model: str = "Scored",
    hand: bool = False,
    fed_twice: bool = False,
) -> Path:
    """A real loop whose fifth batch holds a NaN. feed: how it calls its model."""
    network = getattr(replay_setups, model)()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with watch(network, optimizer, run_dir=folder, flush_steps=2) as w:
        for i in range(1, 9):
            x, y = replay_setups.data(i, i == BAD)
            optimizer.zero_grad()
            loss = feed(network, x, y)
            if fed_twice:
                loss = loss + feed(network, x + 1, y)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            if hand:
                w.step(loss, (x, y))
    assert BAD in kept_steps(folder)
    return folder


def plain(m: Any, x: Any, y: Any) -> Any:
    return m(x)["out"].pow(2).mean()


def two_places(m: Any, x: Any, y: Any) -> Any:
    return m(x, y)["loss"]


def mixed(m: Any, x: Any, y: Any) -> Any:
    return m(x, labels=y)["loss"]


def mapping(m: Any, x: Any, y: Any) -> Any:
    return m(**{"labels": y, "features": x})["loss"]


def outside(m: Any, x: Any, y: Any) -> Any:
    return nn.functional.mse_loss(m(x)["out"], y)


FED = [
    (plain, ["plain_renamed", "plain_tuple"]),
    (two_places, ["own_loss", "own_loss_tuple", "renamed", "nested", "by_train_step"]),
    (mixed, ["own_loss", "renamed", "nested", "by_train_step"]),
    (mapping, ["own_loss", "renamed", "nested", "by_train_step"]),
]


@pytest.mark.parametrize(("feed", "names"), FED, ids=[f.__name__ for f, _ in FED])
def test_what_the_model_was_fed_becomes_the_setups_batch(
    tmp_path: Path, feed: Callable[[Any, Any, Any], torch.Tensor], names: list[str]
) -> None:
    folder = trained(tmp_path / "run", feed)
    x, y = replay_setups.data(BAD, True)
    for name in names:
        setup = make_setup(getattr(replay_setups, name)(), name=name)
        before = [p.detach().clone() for p in setup.model.parameters()]
        (batch,) = replay(folder, BAD, setup).batches
        own = setup.batches[0]
        assert type(batch) is type(own), name
        if feed is plain or "own_loss" not in name:
            assert list(batch) == list(own), name
        found = _tensors(batch)
        assert any(torch.equal(v, x) or v.isnan().sum() == 1 for v in found), name
        assert feed is plain or any(torch.equal(v, y) for v in found), name
        assert all(torch.equal(a, b) for a, b in zip(before, setup.model.parameters(), strict=True))
        assert all(p.grad is None for p in setup.model.parameters())


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for v in value.values() for t in _tensors(v)] if isinstance(value, Mapping) else [value]


COMMAND = [
    ("plain", plain, "Scored", False, "plain_renamed"),
    ("two_places", two_places, "Scored", False, "own_loss"),
    ("mixed", mixed, "Scored", False, "renamed"),
    ("mapping", mapping, "Scored", False, "own_loss"),
    ("handed_over", outside, "Scored", True, "whole"),
    ("no_names", two_places, "ByPlace", False, "by_place"),
]


@pytest.mark.parametrize(("feed", "model", "hand", "name"), [c[1:] for c in COMMAND], ids=[c[0] for c in COMMAND])
def test_on_the_command_line(
    tmp_path: Path, feed: Callable[[Any, Any, Any], torch.Tensor], model: str, hand: bool, name: str
) -> None:
    folder = trained(tmp_path / "run", feed, model=model, hand=hand)
    setup = f"{replay_setups.__file__}:{name}"
    done = run_program("check", folder, "--step", BAD, "--setup", setup, "--format", "json", "--select", "nonfinite-loss")
    report = json.loads(done.stdout)
    assert report["subjects"][0]["name"].endswith(f"batch of step {BAD}")
    assert (done.returncode, report["summary"]["error"]) == (1, 1), done.stdout + done.stderr


def test_the_setups_own_batches_are_healthy() -> None:
    """The twin of the test before: without the kept batch nothing is found."""
    done = run_program("check", f"{replay_setups.__file__}:renamed", "--format", "json", "--select", "nonfinite-loss")
    assert (done.returncode, json.loads(done.stdout)["summary"]["error"]) == (0, 0)


def refused(folder: Path, name: str) -> str:
    with pytest.raises(UsageError) as caught:
        replay(folder, BAD, make_setup(getattr(replay_setups, name)(), name=name))
    text = str(caught.value)
    assert "w.step(loss, batch)" in text
    return text


def test_what_only_the_loss_needs_has_to_be_handed_over(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", outside)
    text = refused(folder, "whole")
    assert "1 of the setup's own batch does not reach the model" in text
    assert "the model was called with: 0 float32 [6, 4]" in text
    assert "own batch is a tuple: 0 float32 [6, 4], 1 float32 [6, 3]" in text
    assert "the model's own loss needs labels" in refused(folder, "own_loss")


def test_what_the_loss_cuts_before_it_calls_the_model_is_not_filled_in(tmp_path: Path) -> None:
    """By its name alone, the cut ids would pass for the whole ones, and be cut a second time."""
    for hand, folder in ((False, tmp_path / "a"), (True, tmp_path / "b")):
        model = TinyLM()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer, run_dir=folder, flush_steps=1) as w:
            for i in range(3):
                ids = tokens(i)
                loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                (loss * math.nan).backward() if i == 2 else loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                if hand:
                    w.step(loss, {"ids": ids, "more": "text"})
        assert 3 in kept_steps(folder)

    def loss_fn(m: Any, b: Any) -> Any:
        return nn.functional.cross_entropy(m(b["ids"][:, :-1]).flatten(0, 1), b["ids"][:, 1:].flatten())

    setup = make_setup({"model": TinyLM(), "batch": {"ids": tokens(50)}, "loss_fn": loss_fn})
    with pytest.raises(UsageError, match="ids of the setup's own batch does not reach the model"):
        replay(tmp_path / "a", 3, setup)
    (batch,) = replay(tmp_path / "b", 3, setup).batches
    assert torch.equal(batch["ids"], tokens(2))


def test_the_same_values_under_two_names_go_to_their_own_places(tmp_path: Path) -> None:
    """Labels that are a copy of the ids: only identity tells which is which."""
    x, y = replay_setups.data(BAD, True)
    folder = trained(tmp_path / "run", two_places)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, features: Any, labels: Any) -> Any:
            return {"loss": self.linear(features).mean() + labels.mean()}

    same = torch.ones(2, 3)
    given = {"model": Both(), "batch": {"b": same, "a": same.clone()}, "loss_fn": lambda m, b: m(b["a"], b["b"])["loss"]}
    (batch,) = replay(folder, BAD, make_setup(given)).batches
    assert torch.equal(batch["b"], y)
    assert torch.equal(batch["a"].isnan(), x.isnan())


def test_two_calls_for_one_backward_are_no_two_micro_batches(tmp_path: Path) -> None:
    assert "called more than once" in refused(trained(tmp_path / "a", two_places, fed_twice=True), "own_loss")
    folder = trained(tmp_path / "b", two_places, fed_twice=True, hand=True)
    setup = make_setup(replay_setups.whole())
    made = replay(folder, BAD, setup)
    assert len(made.batches) == 1
    assert made.accumulation_steps == 1


def test_micro_batches_of_an_accumulated_step(tmp_path: Path) -> None:
    """Handed over after each backward, or only once a step: then what the model was fed is the whole step."""
    for folder, each in ((tmp_path / "each", True), (tmp_path / "once", False)):
        model = TinyLM()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer, run_dir=folder, flush_steps=1) as w:
            for i in range(9):
                ids = tokens(i)
                loss = next_token_loss(model(ids), ids) * (math.nan if i == 7 else 1.0)
                loss.backward()  # type: ignore[no-untyped-call]
                if i % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
                if each or i % 3 == 2:
                    w.step(loss, {"ids": ids})
        (path,) = kept_steps(folder)[3]
        kept = load_batches(path)
        assert [k.micro_batch for k in kept if not k.by_loop] == [0, 1, 2]
        assert sum(k.by_loop for k in kept) == (3 if each else 1)
        setup = make_setup(
            {"model": TinyLM(), "batch": {"ids": tokens(50)}, "loss_fn": lambda m, b: next_token_loss(m(b["ids"]), b["ids"])}
        )
        made = replay(folder, 3, setup)
        assert made.accumulation_steps == 3
        assert all(torch.equal(b["ids"], tokens(6 + k)) for k, b in enumerate(made.batches))


def test_a_batch_handed_over_after_a_step_that_the_scaler_skipped_is_that_steps(tmp_path: Path) -> None:
    """Such a step ends at once: the next one is being put together when the loop hands its batch over."""
    model = TinyLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with watch(model, optimizer, run_dir=tmp_path, flush_steps=64) as w:
        for i in range(4):
            ids = tokens(i)
            loss = next_token_loss(model(ids), ids) * (math.inf if i == 2 else 1.0)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            w.step(loss, {"number": i, "ids": ids})
        keeper = w.flusher.keeper
        assert keeper is not None
        handed = [(m.step, m.plain["number"]) for m in keeper._kept if m.by_loop]
    assert handed == [(1, 0), (2, 1), (3, 2), (4, 3)]


SCRIPT = """
import sys, torch, ghoststep
from tests.watch.replay_setups import Scored, X, Y, data

def setup():
    return {"model": Scored(), "batch": (X, Y)}

def train(run_dir):
    model = Scored()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ghoststep.watch(model, optimizer, run_dir=run_dir, flush_steps=2) as w:
        for i in range(1, 9):
            optimizer.zero_grad()
            model(*data(i, i == 5))["loss"].backward()
            optimizer.step()

GUARD
"""


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_setup_that_is_the_training_script_does_not_go_on_with_the_record(tmp_path: Path, is_guarded: bool) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    call = f"train({str(folder)!r})"
    script.write_text(
        SCRIPT.replace("GUARD", f"if __name__ == '__main__':\n    {call}" if is_guarded else call), encoding="utf-8"
    )
    subprocess.run([sys.executable, script], check=True, env={**os.environ, "PYTHONPATH": str(Path.cwd())}, timeout=120)
    before = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    done = run("check", folder, "--step", BAD, "--setup", f"{script}:setup", "--format", "json", "--select", "nonfinite-loss")
    if is_guarded:
        assert (done.returncode, json.loads(done.stdout)["summary"]["error"]) == (1, 1)
    else:
        assert done.returncode == 2
        assert "is not continued while" in done.stderr
        assert "if __name__ == '__main__':" in done.stderr
    assert {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    assert kept_steps(folder).keys() == {BAD}


def test_other_records_are_written_while_a_setup_is_loaded_and_after(tmp_path: Path) -> None:
    """Near misses: a new folder, and the same one once the setup is there."""
    from ghoststep.run_folder import loading

    folder = trained(tmp_path / "run", plain)
    with loading("train.py"):
        trained(tmp_path / "new", plain)
        with pytest.raises(UsageError, match=r"while train\.py is loaded as a setup"):
            trained(folder, plain)
    trained(folder, plain)


def test_the_example_of_the_guide(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "watch.md").read_text(encoding="utf-8")
    (code,) = [c for c in guide.split("```python\n")[1:] if c.startswith("# train.py")]
    (tmp_path / "train.py").write_text(code.partition("```")[0], encoding="utf-8")
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, timeout=120)
    command = ["check", "runs/1", "--step", "13", "--setup", "train.py:setup"]
    assert f"$ ghoststep {' '.join(command)}" in guide
    done = run(*command, "--format", "json", "--select", "nonfinite-loss", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["summary"]["error"]) == (1, 1), done.stderr
