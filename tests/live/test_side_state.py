"""What a train_step keeps beside the model is put back bit for bit; what cannot be is not touched."""

from __future__ import annotations

import copy
import io
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ghoststep.api import check
from ghoststep.engine import Case
from ghoststep.evidence.base import Missing
from ghoststep.evidence.training import StepProbe
from ghoststep.finding import Outcome
from ghoststep.instruments.live.side_state import side_state
from ghoststep.subjects.setup import make_setup

from .training_setups import batch, good_step, gru, gru_loss, registry, same, snapshot

TOTAL = 0
HISTORY: list[float] = []


def probed(given: dict[str, Any]) -> StepProbe | Missing:
    found = Case([make_setup(given)], registry().instruments).fact(StepProbe)
    assert isinstance(found, (StepProbe, Missing))
    return found


def assert_untouched(given: dict[str, Any], look: Callable[[], Any]) -> None:
    """The step runs, changes what `look` shows on its own, and shows it as before after being probed."""
    before, objects = copy.deepcopy(look()), snapshot(given)
    assert isinstance(probed(given), StepProbe)
    after = look()
    assert repr(after) == repr(before)
    assert same(objects, snapshot(given))
    given["train_step"](given["model"], given["optimizer"], given["batches"][0])
    assert repr(look()) != repr(before)


def test_average_of_weights_and_counter_in_the_closure() -> None:
    given = gru()
    ema = copy.deepcopy(given["model"])
    count = 0

    def step(model: Any, optimizer: Any, b: Any) -> None:
        nonlocal count
        good_step(model, optimizer, b)
        count += 1
        with torch.no_grad():
            for old, new in zip(ema.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)

    assert_untouched({**given, "train_step": step}, lambda: (count, [p.tolist() for p in ema.parameters()]))


def test_torch_averaged_model() -> None:
    given = gru()
    ema = torch.optim.swa_utils.AveragedModel(given["model"])

    def step(model: Any, optimizer: Any, b: Any) -> None:
        good_step(model, optimizer, b)
        ema.update_parameters(model)

    assert_untouched({**given, "train_step": step}, lambda: (int(ema.n_averaged), [p.tolist() for p in ema.parameters()]))


class Metric:
    """As metric objects are: tensors and counters as attributes, made or replaced at an update."""

    seen = 0

    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.count = 0
        self.by_name: defaultdict[str, list[float]] = defaultdict(list)

    def update(self, loss: float) -> None:
        self.total = self.total + loss
        self.total += 1
        self.count += 1
        self.last = loss
        self.by_name["loss"].append(loss)
        Metric.seen += 1


class Trainer:
    """A step bound to an object."""

    __slots__ = ("__private", "metric", "random", "window")

    def __init__(self) -> None:
        self.metric = Metric()
        self.window: deque[float] = deque(maxlen=2)
        self.random = np.random.default_rng(0)
        self.__private = 0

    def step(self, model: Any, optimizer: Any, b: Any) -> None:
        loss = good_step(model, optimizer, b)
        self.metric.update(loss)
        self.window.append(loss)
        self.random.random()
        self.__private += 1

    def look(self) -> Any:
        state = self.random.bit_generator.state["state"]["state"]
        return (sorted(vars(self.metric)), self.metric.total, self.metric.count, dict(self.metric.by_name), Metric.seen,
                list(self.window), state, self.__private)  # fmt: skip


def test_attributes_of_self_and_of_classes() -> None:
    trainer = Trainer()
    assert_untouched({**gru(), "train_step": trainer.step}, trainer.look)


def counting_step(model: Any, optimizer: Any, b: Any) -> None:
    global TOTAL, LATER  # noqa: PLW0603
    TOTAL += 1
    LATER = TOTAL  # type: ignore[name-defined]
    HISTORY.append(good_step(model, optimizer, b))
    counting_step.calls = getattr(counting_step, "calls", 0) + 1  # type: ignore[attr-defined]


def test_globals_and_attributes_of_the_function() -> None:
    def look() -> Any:
        return TOTAL, list(HISTORY), "LATER" in globals(), sorted(vars(counting_step))

    assert_untouched({**gru(), "train_step": counting_step}, look)


def test_containers_arrays_and_second_optimizer() -> None:
    given = gru()
    head = nn.Linear(2, 2)
    other = torch.optim.Adam(head.parameters())
    seen: Counter[str] = Counter()
    kept: set[int] = set()
    array, rows = np.zeros(3), [[0.0]]

    def step(model: Any, optimizer: Any, b: Any) -> None:
        loss = good_step(model, optimizer, b)
        head(torch.ones(2)).sum().backward()
        other.step()
        head.eval()
        seen["steps"] += 1
        kept.add(len(kept))
        array[0] += loss
        rows[0].append(loss)

    assert_untouched(
        {**given, "train_step": step},
        lambda: (
            [p.tolist() for p in head.parameters()], [p.grad is None for p in head.parameters()], head.training,
            other.state_dict(), dict(seen), set(kept), array.tolist(), rows,
        ),
    )  # fmt: skip


def test_lists_that_are_iterated_go_on_where_they_were() -> None:
    given = gru()
    batches = iter([batch(s) for s in range(9)])

    def step(model: Any, optimizer: Any, b: Any) -> None:
        good_step(model, optimizer, next(batches))

    assert isinstance(probed({**given, "train_step": step}), StepProbe)
    assert len(list(batches)) == 9


def endless() -> Iterator[dict[str, torch.Tensor]]:
    number = 0
    while True:
        yield batch(number)
        number += 1


def loader() -> Iterator[dict[str, torch.Tensor]]:
    from torch.utils.data import DataLoader

    examples: Any = [batch(s, size=1) for s in range(9)]
    return iter(DataLoader(examples, batch_size=None))


@pytest.mark.parametrize("kind", ["generator", "loader"])
def test_generators_are_not_advanced(kind: str) -> None:
    given = gru()
    source = endless() if kind == "generator" else loader()

    def step(model: Any, optimizer: Any, b: Any) -> None:
        good_step(model, optimizer, next(source))

    found = probed({**given, "train_step": step, "loss_fn": None})
    assert isinstance(found, Missing)
    assert found.outcome is Outcome.UNKNOWN
    assert "`source`" in found.reason
    assert torch.equal(next(source)["tokens"], batch(0, size=6 if kind == "generator" else 1)["tokens"])


def test_a_generator_that_the_step_only_holds_does_not_matter() -> None:
    class Loop:
        def __init__(self) -> None:
            self.data = endless()

        def step(self, model: Any, optimizer: Any, b: Any) -> None:
            good_step(model, optimizer, b)

    loop = Loop()
    assert isinstance(probed({**gru(), "train_step": loop.step}), StepProbe)
    assert torch.equal(next(loop.data)["tokens"], batch(0)["tokens"])


def test_a_log_file_gets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with path.open("w") as log:

        def step(model: Any, optimizer: Any, b: Any) -> None:
            log.write(f"{good_step(model, optimizer, b)}\n")

        assert isinstance(probed({**gru(), "train_step": step}), StepProbe)
        log.write("mine\n")
    assert path.read_text() == "mine\n"


def test_put_back_when_the_step_raises() -> None:
    count, stream = [0], io.StringIO()

    def step(model: Any, optimizer: Any, b: Any) -> None:
        count[0] += 1
        stream.write("x")
        raise ValueError("no")

    assert isinstance(probed({**gru(), "train_step": step}), Missing)
    assert count == [0]
    assert stream.getvalue() == ""


def test_the_whole_check_leaves_counters_of_the_loss() -> None:
    count = 0

    def loss(model: Any, b: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return gru_loss(model, b)

    given = gru(train_step=None)
    check(**{**given, "loss_fn": loss})
    assert count == 0


def test_the_models_own_state_is_left_to_others() -> None:
    given = gru()
    model = given["model"]
    setup = make_setup({**given, "train_step": lambda m, o, b: model(b["tokens"])})
    with side_state(setup, (setup.train_step,)):
        with torch.no_grad():
            model.out.bias.fill_(3.0)
        model.extra = 1
    assert float(model.out.bias.detach()[0]) == 3.0
    assert model.extra == 1
