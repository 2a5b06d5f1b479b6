"""Going back: bit for bit, past a good checkpoint, without the guilty batch, and only where it can work."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ghoststep.errors import GhoststepError, UsageError
from ghoststep.finding import Finding, Severity, Where
from ghoststep.watching.checkpoints import Checkpoint, Checkpoints
from ghoststep.watching.guarding import our_clip
from ghoststep.watching.judge import Alarm
from ghoststep.watching.quarantine import Quarantine, fingerprint
from ghoststep.watching.rollback import Guard
from ghoststep.watching.state_saver import StateSaver, cannot_roll_back


class Loop:
    """A tiny regression with dropout, AdamW, a schedule, and the loop that a user would write."""

    def __init__(self, accumulation: int = 1) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 200)
        self.accumulation = accumulation
        self.num_batches = 0
        self.losses: list[float] = []  # one a step
        self.parts: list[float] = []
        self.seen: list[int] = []

    def train(self, batch: Mapping[str, Any]) -> None:
        self.seen.append(int(batch["id"]))
        loss: torch.Tensor = ((self.model(batch["x"]) - 1) ** 2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.num_batches += 1
        self.parts.append(loss.item())
        if self.num_batches % self.accumulation == 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(sum(self.parts) / len(self.parts))
            self.parts.clear()

    def saver(self) -> StateSaver:
        return StateSaver(self.model, [self.optimizer], [self.scheduler])

    def state(self) -> list[torch.Tensor]:
        moments = [v for p in self.model.parameters() for v in self.optimizer.state[p].values()]
        return [p.detach().clone() for p in self.model.parameters()] + [m.clone() for m in moments]


class FakeHost:
    """A watch whose flushes find every step with a NaN loss, `lag` steps late."""

    def __init__(self, loop: Loop, lag: int = 3) -> None:
        self.loop, self.lag = loop, lag
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.stopped: list[str] = []
        self.restarts = 0
        self.paused = False
        self.first = 0
        self._known: set[int] = set()
        self._errors: list[int] = []
        self._wanted: Alarm | None = None

    def steps_done(self) -> int:
        self._judge(len(self.loop.losses) - self.lag)
        return len(self.loop.losses)

    def _judge(self, until: int) -> None:
        for step in range(self.first + 1, until + 1):
            bad = math.isnan(self.loop.losses[step - 1]) or self.loop.losses[step - 1] > 1e6
            if bad and step not in self._known and not any(self.first < k for k in self._known):
                self._known.add(step)
                self._errors.append(step)
                if not self.paused:
                    self._wanted = alarm(step)

    def flush(self) -> None:
        self._judge(len(self.loop.losses))

    def judged_until(self) -> int:
        return len(self.loop.losses) - self.lag

    def new_errors(self) -> Sequence[int]:
        new, self._errors = self._errors, []
        return new

    def take_rollback(self) -> Alarm | None:
        wanted, self._wanted = self._wanted, None
        return wanted

    def losses(self, first: int, last: int) -> Sequence[float | None]:
        return self.loop.losses[first - 1 : last]

    def begin_comparison(self) -> None:
        self.paused = True

    def end_comparison(self) -> None:
        self.paused = False

    def restarted(self) -> None:
        self.restarts += 1
        self.first = len(self.loop.losses)

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)

    def event(self, kind: str, payload: Mapping[str, Any]) -> None:
        self.events.append((kind, json.loads(json.dumps(payload))))


def alarm(step: int | None, micro_batch: int | None = None) -> Alarm:
    finding = Finding(message="lost", where=Where(step=step, micro_batch=micro_batch))
    return Alarm(code="GS404", name="hidden-nan-loss", severity=Severity.ERROR, finding=finding, step=step)


def batches(number: int, *poisoned: int, value: float = math.nan) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    made = [{"x": torch.randn(6, 4, generator=generator), "id": i} for i in range(number)]
    for i in poisoned:
        made[i]["x"] = torch.full((6, 4), value)
    return made


def guard(loop: Loop, folder: Path, **more: Any) -> tuple[Guard, FakeHost]:
    host = FakeHost(loop, more.pop("lag", 3))
    settings = {"every": 5, "good_after": 10, "compared": 0, **more}
    return Guard(host=host, saver=loop.saver(), folder=folder, **settings), host


# The built-in saver


def test_training_goes_on_bit_for_bit_from_a_checkpoint(tmp_path: Path) -> None:
    loop = Loop()
    for batch in batches(10):
        loop.train(batch)
    loop.saver().save(str(tmp_path / "state"))
    draws = random.random(), np.random.rand(), torch.rand(1)
    for batch in batches(10):
        loop.train(batch)
    want, lr = loop.state(), loop.scheduler.get_last_lr()
    for batch in batches(20, 3):  # NaN weights
        loop.train(batch)
    assert math.isnan(loop.losses[-1])
    loop.saver().load(str(tmp_path / "state"))
    assert (random.random(), np.random.rand(), torch.rand(1)) == draws
    loop.saver().load(str(tmp_path / "state"))
    torch.rand(1)
    random.random()
    loop.saver().load(str(tmp_path / "state"))
    torch.rand(1)
    for batch in batches(10):
        loop.train(batch)
    assert all(torch.equal(a, b) for a, b in zip(want, loop.state(), strict=True))
    assert lr == loop.scheduler.get_last_lr()
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_what_state_dicts_lose_is_kept(tmp_path: Path) -> None:
    """float32 moments of a bfloat16 weight, a buffer that is not persistent, a parameter of the loss, a tensor as learning rate."""
    model = torch.nn.Linear(3, 3).to(torch.bfloat16)
    model.register_buffer("running", torch.zeros(2), persistent=False)
    of_loss = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([*model.parameters(), of_loss], lr=torch.tensor(0.5), foreach=False)
    (model(torch.ones(1, 3, dtype=torch.bfloat16)).sum() + of_loss.sum()).backward()
    optimizer.step()
    moment = torch.tensor([[1.0000001, 2.0, 3.0]]).expand(3, 3).clone()
    optimizer.state[model.weight]["exp_avg"] = moment.clone()
    before = [of_loss.detach().clone(), model.weight.detach().clone()]
    saver = StateSaver(model, [optimizer])
    saver.save(str(tmp_path / "s"))
    rate = optimizer.param_groups[0]["lr"]
    with torch.no_grad():
        for tensor in (of_loss, model.weight, model.running, rate, optimizer.state[model.weight]["exp_avg"]):
            tensor.fill_(9)  # type: ignore[operator]
    optimizer.param_groups[0]["invented"] = 1
    saver.load(str(tmp_path / "s"))
    assert torch.equal(of_loss, before[0])
    assert torch.equal(model.weight, before[1])
    assert model.running.tolist() == [0, 0]  # type: ignore[operator]
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.float32
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], moment)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
    assert "invented" not in optimizer.param_groups[0]
    assert model.weight.grad is None


def test_state_that_was_not_there_yet_goes_away_again(tmp_path: Path) -> None:
    loop = Loop()
    loop.saver().save(str(tmp_path / "s"))
    first = loop.state() if loop.optimizer.state else []
    loop.train(batches(1)[0])
    want = loop.state()
    loop.saver().load(str(tmp_path / "s"))
    assert not loop.optimizer.state
    assert first == []
    loop.train(batches(1)[0])
    assert all(torch.equal(a, b) for a, b in zip(want, loop.state(), strict=True))


def test_where_it_cannot_work(tmp_path: Path) -> None:
    loop = Loop()

    def why(**change: Any) -> str:
        given: dict[str, Any] = {
            "optimizers": [loop.optimizer], "saver": None, "scheduler": loop.scheduler, "run_dir": tmp_path, "num_ranks": 1,
        }  # fmt: skip
        return cannot_roll_back(loop.model, **{**given, **change})

    assert why() == ""
    assert "run_dir" in why(run_dir=None)
    assert "2 ranks" in why(num_ranks=2)
    assert "optimizer is not known" in why(optimizers=[])
    assert "scheduler" in why(scheduler=None)
    assert why(scheduler=None, saver=loop.saver()) == ""
    assert "no save(path) and no load(path)" in why(saver=object())
    loop.optimizer.state["global"] = {"k": 1}  # type: ignore[index]
    assert "beside its parameters" in why()
    assert "sharded" in cannot_roll_back(
        torch.nn.Linear(2, 2, device="meta"), [torch.optim.SGD(Loop().model.parameters())], saver=None, scheduler=None,
        run_dir=tmp_path, num_ranks=1,
    )  # fmt: skip


# Which checkpoints are good


class NamedSaver:
    """Writes the step's name only."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.full = False

    def save(self, path: str) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        Path(path).mkdir()

    def load(self, path: str) -> None:
        self.loaded.append(Path(path).name)


def test_known_good_is_without_an_error_in_the_steps_after_it(tmp_path: Path) -> None:
    made = Checkpoints(saver=NamedSaver(), folder=tmp_path / "c", good_after=10)
    made.start(0)
    for step in (5, 10, 15):
        made.take(step)
    made.judged(18, [])
    assert made.before(19) == Checkpoint(step=5, path=tmp_path / "c" / "step-000005")
    assert made.before(5) == Checkpoint(step=0, path=tmp_path / "c" / "step-000000", is_start=True)
    made.judged(20, [20])
    # 10 has the error in its tenth step: not good; 15 neither
    assert made.before(20) == Checkpoint(step=5, path=tmp_path / "c" / "step-000005")
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step-000000", "step-000005"]


def test_the_start_is_the_last_resort(tmp_path: Path) -> None:
    made = Checkpoints(saver=NamedSaver(), folder=tmp_path / "c", good_after=10)
    made.start(0)
    made.take(5)
    made.judged(7, [7])
    assert made.before(7) == Checkpoint(step=0, path=tmp_path / "c" / "step-000000", is_start=True)
    assert made.before(0) is None


def test_the_last_three_good_ones_are_kept(tmp_path: Path) -> None:
    made = Checkpoints(saver=NamedSaver(), folder=tmp_path / "c", good_after=10)
    made.start(0)
    for step in range(5, 101, 5):
        made.take(step)
        made.judged(step, [])
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [f"step-{n:06d}" for n in (80, 85, 90, 95, 100)]
    made.rolled_back(Checkpoint(step=85, path=tmp_path), 100)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [f"step-{n:06d}" for n in (80, 85)]
    made.close()
    assert not (tmp_path / "c").exists()


def test_a_full_disk_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = NamedSaver()
    made = Checkpoints(saver=saver, folder=tmp_path / "c", good_after=10)
    made.start(0)
    saver.full = True
    made.take(5)
    made.take(10)
    assert "No space" in made.failed
    assert len(caplog.records) == 1
    assert made.before(20) is not None
    saver.full = False
    made.take(15)
    assert (made.failed, made.last_step) == ("", 15)


def test_a_state_that_cannot_be_read_again_is_refused_at_the_start(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"path": tmp_path}

    loop = Loop()
    saver = StateSaver(loop.model, [loop.optimizer], [Odd()])
    with pytest.raises(UsageError, match="give a saver"):
        Checkpoints(saver=saver, folder=tmp_path / "c").start(0)


def test_a_failed_restore_is_an_error(tmp_path: Path) -> None:
    loop = Loop()
    made = Checkpoints(saver=loop.saver(), folder=tmp_path / "c")
    made.start(0)
    (tmp_path / "c" / "step-000000").write_bytes(b"spoilt")
    start = made.before(1)
    assert start is not None
    with pytest.raises(GhoststepError, match="may be half restored"):
        made.restore(start)


# Quarantine


def test_fingerprints_tell_batches_apart() -> None:
    base = {"x": torch.arange(4), "y": ["a"]}
    same = {"x": torch.arange(8)[:4].clone(), "y": ["a"]}
    assert fingerprint(base) == fingerprint(same)
    others: list[Any] = [
        {"x": torch.arange(4), "y": ["b"]}, {"x": torch.arange(4).float(), "y": ["a"]}, {"z": torch.arange(4), "y": ["a"]},
        {"x": torch.arange(4).reshape(2, 2), "y": ["a"]}, (torch.arange(4), ["a"]), torch.arange(4), {},
    ]  # fmt: skip
    assert len({fingerprint(base), *map(fingerprint, others)}) == 8
    nan = torch.tensor([math.nan], dtype=torch.bfloat16)
    assert fingerprint((nan,)) == fingerprint((nan.clone(),))
    assert fingerprint(torch.eye(3).to_sparse()) == fingerprint(torch.eye(3).to_sparse())


def test_the_list_survives_a_resume_and_a_stranger(tmp_path: Path) -> None:
    first = Quarantine(tmp_path)
    assert {"x": torch.ones(2)} not in first
    first.add({"x": torch.ones(2)}, {"index": 3})
    with (tmp_path / "quarantine.jsonl").open("a") as file:
        file.write('not json\n[1]\n{"sha256": 3}\n{"sha256": "short"}\n')
    again = Quarantine(tmp_path)
    assert {"x": torch.ones(2)} in again
    assert {"x": torch.zeros(2)} not in again
    assert len(again.known) == 1


# The guard


def test_a_poisoned_run_recovers_bit_for_bit(tmp_path: Path) -> None:
    loop = Loop()
    made, host = guard(loop, tmp_path)
    data = batches(60, 32)
    for batch in made.over(data):
        loop.train(batch)
    # found at step 33, three steps late: back to the good state after step 20 (25 would need 35 steps without an error)
    (rolled,) = [p for kind, p in host.events if kind == "rollback"]
    assert (rolled["error_step"], rolled["at_step"], rolled["to_step"], rolled["is_known_good"]) == (33, 36, 20, True)
    assert [(g["index"], g["epoch"]) for g in rolled["guilty"]] == [(32, 0)]
    assert loop.seen == [*range(36), *range(20, 32), *range(33, 60)]
    assert all(math.isfinite(x) for x in loop.losses[36:])
    twin = Loop()
    for batch in [*data[:32], *data[33:]]:  # as if the batch had never been there
        twin.train(batch)
    assert all(torch.equal(a, b) for a, b in zip(loop.state(), twin.state(), strict=True))
    assert loop.losses[36:] == twin.losses[20:]


def test_without_a_fault_nothing_changes(tmp_path: Path) -> None:
    loop = Loop()
    made, host = guard(loop, tmp_path)
    for batch in made.over(batches(60)):
        loop.train(batch)
    twin = Loop()
    for batch in batches(60):
        twin.train(batch)
    assert loop.losses == twin.losses
    assert all(torch.equal(a, b) for a, b in zip(loop.state(), twin.state(), strict=True))
    assert host.events == []


def test_the_comparison_shows_the_difference_and_leaves_no_trace(tmp_path: Path) -> None:
    loop = Loop()
    made, host = guard(loop, tmp_path, compared=4)
    data = batches(60, 32)
    for batch in made.over(data):
        loop.train(batch)
    (compared,) = [p for kind, p in host.events if kind == "comparison"]
    assert compared["steps"] == 4
    assert math.isnan(compared["mean_loss"]["with"])
    assert 0 < compared["mean_loss"]["without"] < 10
    assert math.isnan(compared["difference"])
    some = [20, 21, 22, 23]
    assert loop.seen == [*range(36), 32, *some, *some, *range(20, 32), *range(33, 60)]
    assert not host.paused
    twin = Loop()
    for batch in [*data[:32], *data[33:]]:
        twin.train(batch)
    assert all(torch.equal(a, b) for a, b in zip(loop.state(), twin.state(), strict=True))


def test_the_remedys_side(tmp_path: Path) -> None:
    loop = Loop()
    entered: list[str] = []

    def remedy() -> Any:
        import contextlib

        @contextlib.contextmanager
        def inside() -> Iterator[None]:
            entered.append("in")
            yield
            entered.append("out")

        return inside()

    made, host = guard(loop, tmp_path, compared=2, remedy=remedy)
    for batch in made.over(batches(50, 32, value=1e8)):
        loop.train(batch)
    (compared,) = [p for kind, p in host.events if kind == "comparison"]
    assert set(compared["mean_loss"]) == {"with", "without", "with remedy"}
    assert compared["mean_loss"]["with"] == compared["mean_loss"]["with remedy"], (
        "this remedy does nothing: the sides start alike"
    )
    assert compared["difference"] == compared["mean_loss"]["with"] - compared["mean_loss"]["without"]
    assert entered == ["in", "out"]


def test_the_guilty_batch_is_left_out_when_it_comes_again(tmp_path: Path) -> None:
    loop = Loop()
    made, host = guard(loop, tmp_path)
    data = batches(60, 32)
    for _ in range(2):
        for batch in made.over([dict(b) for b in data]):
            loop.train(batch)
    assert loop.seen.count(32) == 1
    assert loop.seen.count(33) == 3, "undone, made again, and in the second pass"
    assert [p for k, p in host.events if k == "batch-left-out"] == [{"epoch": 1, "index": 32}]
    lines = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["step"] == 33
    resumed = Loop()
    again, _ = guard(resumed, tmp_path)
    for batch in again.over(data):
        resumed.train(batch)
    assert resumed.seen == [*range(32), *range(33, 60)]


def test_under_accumulation_whole_steps_go_back(tmp_path: Path) -> None:
    loop = Loop(accumulation=4)
    made, host = guard(loop, tmp_path, compared=2, every=3, good_after=5)
    data = batches(120, 62)  # micro-batch 2 of step 16
    for batch in made.over(data):
        loop.train(batch)
    rolled = next(p for kind, p in host.events if kind == "rollback")
    assert rolled["error_step"] == 16
    assert [g["index"] for g in rolled["guilty"]] == [60, 61, 62, 63]  # the NaN names no micro-batch
    assert rolled["at_step"] == 19
    assert rolled["to_step"] == 9
    twin = Loop(accumulation=4)
    for batch in [*data[: 15 * 4], *data[16 * 4 :]]:
        twin.train(batch)
    assert all(torch.equal(a, b) for a, b in zip(loop.state(), twin.state(), strict=True))


def test_a_finding_that_names_the_micro_batch_accuses_only_that(tmp_path: Path) -> None:
    loop = Loop(accumulation=4)
    made, host = guard(loop, tmp_path)
    for i, batch in enumerate(made.over(batches(60))):
        loop.train(batch)
        if i == 4 * 12 - 1:
            host._wanted = alarm(11, micro_batch=1)
    rolled = next(p for kind, p in host.events if kind == "rollback")
    assert [g["index"] for g in rolled["guilty"]] == [41]


def test_breaking_out_of_a_comparison_leaves_the_good_state(tmp_path: Path) -> None:
    loop = Loop()
    made, host = guard(loop, tmp_path, compared=4)
    for batch in made.over(batches(60, 32)):
        loop.train(batch)
        if len(loop.seen) == 38:  # amid the side with the poisoned batch
            break
    import gc

    gc.collect()
    twin = Loop()
    for batch in batches(20):
        twin.train(batch)
    assert all(torch.equal(a, b) for a, b in zip(loop.state(), twin.state(), strict=True))
    assert not host.paused


def test_an_alarm_after_the_last_batch_still_goes_back(tmp_path: Path) -> None:
    loop = Loop()
    made, _ = guard(loop, tmp_path, compared=4)
    for batch in made.over(batches(34, 33)):
        loop.train(batch)
    twin = Loop()
    for batch in batches(33):
        twin.train(batch)
    assert all(torch.equal(a, b) for a, b in zip(loop.state(), twin.state(), strict=True))


def test_batches_that_are_no_longer_at_hand_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ghoststep.watching.rollback.MAX_BYTES", 8 * 6 * 4 * 4)
    loop = Loop()
    made, host = guard(loop, tmp_path)
    for batch in made.over(batches(60, 32)):
        loop.train(batch)
    rolled = next(p for kind, p in host.events if kind == "rollback")
    assert rolled["steps_not_at_hand"] == 8
    assert loop.seen == [*range(36), *range(28, 32), *range(33, 60)]


def test_too_many_rollbacks_and_none_to_go_to_stop_the_loop(tmp_path: Path) -> None:
    loop = Loop()
    made, host = guard(loop, tmp_path / "a", lag=0, max_rollbacks=2, good_after=2, every=1)
    for batch in made.over(batches(60, 10, 20, 30, 40)):
        loop.train(batch)
    assert made.num_rollbacks == 2
    assert "2 times already" in host.stopped[0]
    loop = Loop()
    made, host = guard(loop, tmp_path / "b", lag=0)
    for i, batch in enumerate(made.over(batches(3))):
        loop.train(batch)
        if i == 0:
            host._wanted = alarm(0)
    assert "no checkpoint from before" in host.stopped[0]


def test_an_error_whose_step_is_unknown_goes_back_and_accuses_nobody(tmp_path: Path) -> None:
    loop = Loop()
    made, host = guard(loop, tmp_path, compared=4)
    for i, batch in enumerate(made.over(batches(40))):
        loop.train(batch)
        if i == 30:
            host._wanted = alarm(None)
    rolled = next(p for kind, p in host.events if kind == "rollback")
    assert rolled["guilty"] == []
    assert not (tmp_path / "quarantine.jsonl").exists()
    assert loop.seen == [*range(31), *range(rolled["to_step"], 40)]


def test_what_the_loop_takes_out_of_a_batch_is_there_again(tmp_path: Path) -> None:
    loop = Loop()
    made, host = guard(loop, tmp_path, compared=2)
    for batch in made.over([dict(b) for b in batches(60, 32)]):
        loop.train(batch)
        batch.pop("x")
    assert any(kind == "comparison" for kind, _ in host.events)


# The remedy


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_norm_])
def test_our_clip_stands_in_for_torchs_under_any_name(clip: Callable[..., Any]) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        made = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2))
        for p in made.parameters():
            p.grad = torch.ones_like(p)
        made[0].weight.grad[1] = 1e30  # type: ignore[index, operator]
        return made

    first = model()
    clip(first.parameters(), 1.0)
    assert not any(p.grad is not None and p.grad.any() for p in first.parameters())
    second = model()
    with our_clip():
        clip(second.parameters(), 1.0)
    assert all(p.grad is not None and p.grad.any() for p in second.parameters())
    third = model()
    clip(third.parameters(), 1.0)
    assert not any(p.grad is not None and p.grad.any() for p in third.parameters())


# On a real watch


class Lookup(torch.nn.Module):
    """An embedding, dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(16, 8)
        self.drop = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.drop(self.table(ids)))
        return out


def looped(model: Lookup, optimizer: torch.optim.Optimizer, loader: Iterator[Any]) -> None:
    for batch in loader:
        loss = torch.nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["ids"].flatten()) * batch["weight"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def id_batches(number: int, poisoned: int | None) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {
            "ids": torch.randint(0, 16, (4, 6), generator=generator),
            "weight": torch.tensor(math.nan if i == poisoned else 1.0),
        }
        for i in range(number)
    ]


def test_a_real_watch_goes_back_and_the_run_is_what_it_would_have_been(tmp_path: Path) -> None:
    from ghoststep.watching.guarding import make_guard
    from ghoststep.watching.watch import watch

    model = Lookup()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    policy = {"hidden-nan-loss": "rollback", "nonfinite-gradient": "rollback"}
    with watch(model, optimizer, run_dir=tmp_path, policy=policy, flush_steps=8) as w:
        made = make_guard(w, run_dir=tmp_path, every=5, good_after=10, compared=3)
        assert made is not None
        looped(model, optimizer, made.over(id_batches(60, 32)))
    made.close()
    assert made.num_rollbacks == 1
    twin = Lookup()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    data = id_batches(60, None)
    looped(twin, optimizer, iter([*data[:32], *data[33:]]))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    report = w.report()
    assert report.exit_code == 1, "what was found stays found"
    (line,) = (tmp_path / "rank-00000" / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(line)["index"] == 32
    assert not (tmp_path / "rank-00000" / "checkpoints").exists()


def test_the_steps_of_a_comparison_are_no_steps_of_the_run(tmp_path: Path) -> None:
    """Not in the record, not in the report, not among the kept batches, not in a sink, and the numbers go on without them."""
    from ghoststep.instruments.run_record import run_record
    from ghoststep.subjects.run import open_run
    from ghoststep.watching.replay import kept_steps
    from ghoststep.watching.watch import watch

    model = Lookup()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    policy = {"hidden-nan-loss": "rollback", "nonfinite-gradient": "rollback"}
    lines = tmp_path / "steps.jsonl"
    numbers: list[int] = []
    with watch(model, optimizer, run_dir=tmp_path / "run", policy=policy, flush_steps=8, sinks=f"jsonl:{lines}") as w:
        loader = w.guard(id_batches(60, 32), every=5, good_after=10, compared=3)
        assert w._guard is not None
        looped(model, optimizer, (_noted(numbers, w, b) for b in loader))
        made = w._guard
    events = _events(tmp_path / "run")
    (rolled,) = [p for kind, p in events if kind == "rollback"]
    (compared,) = [p for kind, p in events if kind == "comparison"]
    assert set(compared["mean_loss"]) == {"with", "without", "with remedy"}
    assert compared["mean_loss"]["without"] > 0
    assert math.isnan(compared["mean_loss"]["with"])
    undone = rolled["at_step"]
    again = 59 - rolled["to_step"]  # but for the guilty one
    (rank,) = run_record(open_run(str(tmp_path / "run"))).ranks
    assert [s.number for s in rank.steps] == list(range(1, undone + again + 1))
    assert len(numbers) == undone + again + 4 + 3 + 4, "the loop did train them"
    # what comes after the comparison is what a run without one records
    assert numbers[-again:] == list(range(undone + 1, undone + again + 1))
    twin = Lookup()
    with watch(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2)) as other:
        data = id_batches(60, None)
        looped(twin, other.optimizers[0], iter([*data[:32], *data[33:]]))
    assert [s.loss for s in rank.steps[undone:]] == [s.loss for s in other.flusher.kept[rolled["to_step"] :]]
    report = w.report()
    steps = {f.where.step for v in report.verdicts for f in v.findings}
    assert steps
    assert all(s is None or rolled["error_step"] <= s <= undone for s in steps), steps
    assert report.subjects[0].facts["steps"] == undone + again
    assert set(kept_steps(tmp_path / "run")) <= set(range(rolled["error_step"], undone + 1))
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [t["ghoststep/steps/number"] for t in told if "alarm" not in t] == list(range(1, undone + again + 1))
    assert made.num_rollbacks == 1


def _noted(numbers: list[int], w: Any, batch: Any) -> Any:
    numbers.append(w.builder.number + (1 if w.builder.has_stepped else 0))
    if w.flusher.keeper is not None:
        kept = [m.step for m in w.flusher.keeper._kept]
        assert sorted(set(kept)) == kept, "one batch a step: those of a comparison would stand beside the run's own"
    return batch


def _events(run_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    import msgspec

    from ghoststep.run_frames import EVENT, SegmentReader

    found = []
    for path in sorted((run_dir / "rank-00000").glob("*.seg")):
        for frame in SegmentReader(path):
            if frame.kind == EVENT:
                event = msgspec.msgpack.decode(frame.data)
                found.append((event["kind"], event["payload"]))
    return found


def test_breaking_out_of_a_real_comparison_leaves_the_runs_own_numbers(tmp_path: Path) -> None:
    from ghoststep.watching.watch import watch

    model = Lookup()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    policy = {"hidden-nan-loss": "rollback", "nonfinite-gradient": "rollback"}
    with watch(model, optimizer, policy=policy, flush_steps=8, run_dir=tmp_path) as w:
        loader = w.guard(id_batches(60, 32), every=5, good_after=10, compared=3)
        looped(model, optimizer, (b for i, b in zip(range(42), loader, strict=False)))
        is_comparing = w.flusher.aside is not None
        loader.close()  # type: ignore[attr-defined]
        assert is_comparing
        assert w.flusher.aside is None
        looped(model, optimizer, iter(id_batches(5, None)))
    numbers = [s.number for s in w.flusher.kept]
    assert numbers == list(range(1, len(numbers) + 1))
    assert w.flusher.spool is not None
    assert w.flusher.spool.last_number == numbers[-1]


def test_without_a_rollback_policy_batches_pass_through(tmp_path: Path) -> None:
    from ghoststep.watching.guarding import make_guard
    from ghoststep.watching.watch import watch

    model = Lookup()
    with watch(model, torch.optim.AdamW(model.parameters()), run_dir=tmp_path) as w:
        assert make_guard(w, run_dir=tmp_path) is None
