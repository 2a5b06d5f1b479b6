"""A watch that nobody starts says so; what cannot be used is refused in words; an optimizer of another model is no optimizer."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ghoststep
from ghoststep.errors import UsageError
from ghoststep.finding import Outcome
from ghoststep.watching import patches
from ghoststep.watching.policy import GhoststepWarning
from tests.watch.loops import TinyLM, next_token_loss, tokens

NEVER = "this watch was never started"


def pair(**options: Any) -> tuple[TinyLM, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = TinyLM(**options)
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def train(model: Any, optimizer: Any, steps: int = 4, each: Callable[[], None] = lambda: None) -> None:
    for i in range(steps):
        optimizer.zero_grad()
        next_token_loss(model(tokens(i)), tokens(i)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        each()


def told(call: Callable[[], None]) -> list[warnings.WarningMessage]:
    """The warnings of ours that a call brings, collected rubbish included."""
    gc.collect()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
        gc.collect()
    return [w for w in seen if issubclass(w.category, GhoststepWarning)]


# A watch that is never started


def test_closing_a_watch_that_was_never_started_says_so_once() -> None:
    model, optimizer = pair()

    def closed_twice() -> None:
        w = ghoststep.watch(model, optimizer, policy="raise")
        train(model, optimizer)
        w.close()
        w.close()

    (warning,) = told(closed_twice)
    assert NEVER in str(warning.message)
    assert "with ghoststep.watch" in str(warning.message)
    assert warning.filename == __file__


def test_forgetting_it_says_so_too() -> None:
    model, optimizer = pair()

    def forgotten() -> None:
        w = ghoststep.watch(model, optimizer)
        train(model, optimizer)
        del w

    (warning,) = told(forgotten)
    assert NEVER in str(warning.message)
    assert warning.filename == __file__  # where it was made: nothing else is known of it any more


def test_a_started_watch_and_a_refused_one_say_nothing(tmp_path: Path) -> None:
    model, optimizer = pair()

    def started() -> None:
        with ghoststep.watch(model, optimizer) as w:
            train(model, optimizer)
        w.close()
        by_hand = ghoststep.watch(model, optimizer).start()
        train(model, optimizer)
        by_hand.close()

    def refused() -> None:
        (tmp_path / "file").touch()
        every: list[dict[str, Any]] = [{"policy": "skip-step"}, {"run_dir": tmp_path / "file"}]
        for wishes in every:
            w = ghoststep.watch(model, optimizer, **wishes)
            with pytest.raises(UsageError):
                w.start()
            w.close()
        with pytest.raises(UsageError):
            ghoststep.watch(model, "adam")

    assert told(started) == []
    assert told(refused) == []


@pytest.mark.parametrize("name", ["should_stop", "step", "flush", "report", "guard"])
def test_what_needs_a_started_watch_refuses(name: str) -> None:
    model, optimizer = pair()
    w = ghoststep.watch(model, optimizer)
    calls: dict[str, Callable[[], Any]] = {
        "should_stop": lambda: w.should_stop, "step": lambda: w.step(batch={"ids": tokens(0)}), "flush": w.flush,
        "report": w.report, "guard": lambda: w.guard([1]),
    }  # fmt: skip
    with pytest.raises(UsageError, match="was not started"):
        calls[name]()
    with w:
        train(model, optimizer)
        assert not w.should_stop
    assert not w.faults
    assert not w.should_stop
    assert w.report().subjects[0].facts["steps"] == 4


SCRIPT = """
import os, sys, torch, ghoststep
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
w = ghoststep.watch(model, optimizer)
if "fork" in sys.argv and os.fork() == 0:
    sys.exit(0)
if "start" in sys.argv:
    w.start()
for _ in range(3):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
if "raise" in sys.argv:
    raise SystemExit(7)
"""


def script(tmp_path: Path, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, *options, "train.py", *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [(), ("fork",), ("raise",)])
def test_the_end_of_a_process_says_so_once_without_a_traceback(arguments: tuple[str, ...], tmp_path: Path) -> None:
    if "fork" in arguments and not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    done = script(tmp_path, *arguments)
    assert done.returncode == (7 if "raise" in arguments else 0)
    assert done.stderr.count(NEVER) == 1
    assert "train.py:5: GhoststepWarning" in done.stderr
    assert "Traceback" not in done.stderr


def test_where_warnings_are_errors_the_end_is_a_log_line_and_no_traceback(tmp_path: Path) -> None:
    done = script(tmp_path, options=("-W", "error::UserWarning"))
    assert (done.returncode, done.stderr.count(NEVER)) == (0, 1)
    assert "Traceback" not in done.stderr
    assert script(tmp_path, "start").stderr == ""


# Arguments of a wrong type

MODEL, OPTIMIZER = pair()


class Loads:
    def load(self, path: str) -> None: ...


WRONG: dict[str, tuple[Any, str]] = {
    "model: None": ({"model": None}, "model is None; expected a torch.nn.Module"),
    "model: text": ({"model": "gpt2\x1b[31m"}, r"model is the text 'gpt2\\x1b\[31m'"),
    "model: class": ({"model": TinyLM}, "model is the class TinyLM"),
    "optimizer: text": ({"optimizer": "adam"}, r"the text 'adam'; expected an optimizer .*param_groups.*AdamW"),
    "optimizer: parameters": ({"optimizer": MODEL.parameters()}, "optimizer is a generator"),
    "optimizer: class": ({"optimizer": torch.optim.AdamW}, "the class AdamW"),
    "optimizer: mapping": ({"optimizer": {"optimizer": OPTIMIZER}}, "optimizer is a dict"),
    "optimizer: one of two": ({"optimizer": [OPTIMIZER, None]}, r"optimizer\[1\] is None"),
    "run_dir": ({"run_dir": 7}, "run_dir is the number 7; expected the path"),
    "run_dir: nothing": ({"run_dir": ""}, "run_dir is the text ''"),
    "tokenizer": ({"tokenizer": 3}, "tokenizer is the number 3; .*decode"),
    "tokenizer: text": ({"tokenizer": "gpt2"}, "from_pretrained"),
    "scheduler": ({"scheduler": 3}, "scheduler is the number 3; .*state_dict"),
    "scheduler: optimizer": ({"scheduler": OPTIMIZER}, "scheduler is an AdamW"),
    "scaler": ({"scaler": 3}, "scaler is the number 3; .*GradScaler"),
    "scaler: mapping": ({"scaler": {}}, "scaler is a dict"),
    "saver": ({"saver": object()}, r"saver is an object; .*save\(path\)"),
    "saver: half": ({"saver": Loads()}, "saver is a Loads"),
    "strict": ({"strict": "yes"}, "strict is the text 'yes'; expected True or False"),
    "sinks": ({"sinks": 7}, "sinks is the number 7; expected a spec"),
    "sinks: mapping": ({"sinks": {"jsonl": "a"}}, "sinks is a dict"),
    "flush_steps": ({"flush_steps": "a"}, "flush_steps is the text 'a'; expected a whole number"),
    "flush_steps: none": ({"flush_steps": 0}, "0; expected a whole number, 1 or more"),
    "flush_steps: half": ({"flush_steps": 1.5}, "the number 1.5"),
    "flush_steps: True": ({"flush_steps": True}, "flush_steps is True"),
    "flush_seconds": ({"flush_seconds": None}, "flush_seconds is None; expected seconds"),
    "flush_seconds: NaN": ({"flush_seconds": float("nan")}, "nan; expected seconds, more than 0"),
    "keep_batches_bytes": ({"keep_batches_bytes": -1}, "-1; expected a whole number, 0 or more"),
    "detail": ({"detail": 3}, "detail is the number 3; expected one of default, full"),
    "detail: list": ({"detail": ["full"]}, "detail is a list"),
    "policy": ({"policy": 3}, "policy is the number 3; expected one of log"),
    "policy: list": ({"policy": ["stop"]}, "policy is a list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_used_is_refused_in_words(case: str) -> None:
    wishes, expected = WRONG[case]
    wishes = {"model": MODEL, "optimizer": OPTIMIZER, **wishes}
    with pytest.raises(UsageError, match=expected):
        ghoststep.watch(wishes.pop("model"), wishes.pop("optimizer"), **wishes)


def test_a_sink_that_is_no_sink_is_refused_at_the_start(tmp_path: Path) -> None:
    class Mine:
        def write(self, step: Any, facts: Any) -> None: ...
        def alarm(self, code: str, name: str, severity: Any, message: str, step: int | None) -> None: ...
        def close(self) -> None: ...

    with pytest.raises(UsageError, match=r"sinks is a Mine; expected a list: sinks=\[Mine\(\.\.\.\)\]"):
        ghoststep.watch(MODEL, OPTIMIZER, sinks=Mine())  # type: ignore[arg-type]
    for given, expected in (([7], "got int"), ([Mine], r"Mine\(\.\.\.\); got the class"), ([f"jsonl:{tmp_path}"], "folder")):
        with pytest.raises(UsageError, match=expected):
            ghoststep.watch(MODEL, OPTIMIZER, sinks=given).start()


class Groups:
    """An optimizer of another library: groups, and nothing else of torch's."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters()), "lr": 0.1}]

    def step(self) -> None: ...


class Decodes:
    def decode(self, ids: list[int]) -> str:
        return str(ids)


class Vocabulary:
    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}


class Steps:
    def get_last_lr(self) -> list[float]:
        return [0.1]


class Scales:
    def get_scale(self) -> float:
        return 1.0


class Saves(Loads):
    def save(self, path: str) -> None: ...


RIGHT: dict[str, dict[str, Any]] = {
    "groups": {"optimizer": Groups(MODEL)},
    "tuple": {"optimizer": (OPTIMIZER, OPTIMIZER)},
    "empty list": {"optimizer": []},
    "decodes": {"tokenizer": Decodes()},
    "vocabulary": {"tokenizer": Vocabulary()},
    "scheduler": {"scheduler": Steps()},
    "torch's scheduler": {"scheduler": torch.optim.lr_scheduler.LambdaLR(OPTIMIZER, lambda _: 1.0)},
    "scaler": {"scaler": Scales()},
    "torch's scaler": {"scaler": torch.amp.GradScaler("cpu")},
    "saver": {"saver": Saves()},
    "numbers of numpy": {"flush_steps": np.int64(3), "flush_seconds": np.float32(1), "keep_batches_bytes": 64e6},
    "never by time": {"flush_seconds": float("inf"), "keep_batches_bytes": 0},
    "no sinks": {"sinks": None},
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_can_be_used_is_taken(case: str) -> None:
    wishes = {"optimizer": OPTIMIZER, **RIGHT[case]}
    with ghoststep.watch(MODEL, wishes.pop("optimizer"), **wishes) as w:
        train(MODEL, OPTIMIZER)
    assert not w.faults
    assert w.report().subjects[0].facts["steps"] == 4
    assert len(w.flusher.facts.optimizers) in (1, 2 if case == "groups" else 1)


class Uninitialised(torch.optim.Optimizer):
    """One that never called torch's `__init__`, with torch's own one inside."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("wishes", [{}, {"policy": {"GS401": "skip-step"}, "strict": True}])
def test_the_optimizer_inside_a_wrapper_is_the_one_that_counts(wishes: dict[str, Any]) -> None:
    model, optimizer = pair()
    wrapped = [Uninitialised(optimizer)]
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    with_lightning = pytest.importorskip("lightning.pytorch.core.optimizer", reason="lightning is not installed")
    wrapped += [accelerate.Accelerator(cpu=True).prepare(optimizer), with_lightning.LightningOptimizer(optimizer)]
    for one in wrapped:
        with ghoststep.watch(model, one, **wishes) as w:
            train(model, optimizer)
        assert not w.faults
        assert w.flusher.facts.optimizers == ("AdamW",)
        assert w.report().verdict("zeroed-step").outcome is Outcome.CLEAR
    with ghoststep.watch(MODEL, Groups(MODEL), **wishes) as w:
        train(MODEL, OPTIMIZER)
    assert w.flusher.facts.optimizers == ("Groups", "AdamW")


def test_a_path_like_folder_is_a_folder(tmp_path: Path) -> None:
    with ghoststep.watch(MODEL, OPTIMIZER, run_dir=str(tmp_path / "a")) as w:
        train(MODEL, OPTIMIZER)
    assert w.report().verdict("zeroed-step").outcome is Outcome.CLEAR
    assert (tmp_path / "a" / "ghoststep-run.json").exists()


def test_parameters_without_a_shape_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UsageError, match="no shape yet"):
        ghoststep.watch(model)
    model(torch.ones(1, 2))
    ghoststep.watch(model).start().close()


# An optimizer of another model


def refused(model: Any, optimizer: Any, expected: str) -> None:
    w = ghoststep.watch(model, optimizer)
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(UsageError, match=expected):
        w.start()
    assert w not in patches._listeners
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, _ = pair()
    other = nn.Linear(2, 2)
    refused(
        model, torch.optim.SGD(other.parameters(), 0.1), r"\(SGD\) holds 2 tensors.*trainable parameter of this TinyLM.*build"
    )
    refused(model, [Groups(other), torch.optim.SGD(other.parameters(), 0.1)], r"\(Groups, SGD\) holds 4 tensors")


def test_an_optimizer_from_before_the_model_had_its_parameters_is_refused() -> None:
    with torch.device("meta"):
        model = TinyLM()
        before = torch.optim.AdamW(model.parameters(), 1e-3)
    model.to_empty(device="cpu")
    refused(model, before, "to_empty")
    with ghoststep.watch(model, torch.optim.AdamW(model.parameters(), 1e-3)):
        pass
    head, _ = pair()
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    before = torch.optim.AdamW(head.parameters(), 0.1)
    head.head = nn.Linear(32, 64)
    refused(head, before, r"are parameters of it that are frozen \(requires_grad=False\)")


def test_peft_after_the_optimizer_is_refused_and_before_it_is_fine() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    model, before = pair()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["qkv"]))
    refused(wrapped, before, "after PEFT")
    after = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], 1e-3)
    for watched in (wrapped, model):
        with ghoststep.watch(watched, after) as w:
            train(model, after)
        assert w.report().subjects[0].facts["steps"] == 4
    with ghoststep.watch(wrapped, torch.optim.AdamW(wrapped.parameters(), 1e-3)):  # frozen ones among them
        pass


def test_one_of_several_is_enough() -> None:
    model, optimizer = pair()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with ghoststep.watch(model, [other, optimizer]) as w:
        train(model, optimizer)
    assert w.report().subjects[0].facts["steps"] == 4


def test_a_compiled_model_and_one_that_was_thawed_are_fine() -> None:
    model, optimizer = pair()
    with ghoststep.watch(torch.compile(model, backend="eager"), optimizer):  # type: ignore[arg-type]
        pass
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model.head.weight.requires_grad_()
    w = ghoststep.watch(model, optimizer)  # made while nearly all is frozen
    for parameter in model.parameters():
        parameter.requires_grad_()
    with w:
        train(model, optimizer)
    assert len(w.flusher.facts.trainable) == len(list(model.parameters()))
    assert w.flusher.kept[0].num_gradients == len(list(model.parameters()))


def test_ddp_and_fsdp(one_rank: Any) -> None:
    model, optimizer = pair()
    with ghoststep.watch(nn.parallel.DistributedDataParallel(model), optimizer) as w:
        train(model, optimizer)
    assert w.report().subjects[0].facts["steps"] == 4

    from torch.distributed.fsdp import fully_shard

    model, before = pair()
    early = ghoststep.watch(model)  # made before, started after: it watches what trains then
    fully_shard(model)
    refused(model, before, "after PEFT, a new head, .to_empty\\(\\) or fully_shard")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with early, ghoststep.watch(model, optimizer) as w:
        train(model, optimizer)
    for watched in (early, w):
        assert not watched.faults
        assert watched.report().subjects[0].facts["steps"] == 4


def test_an_integration_is_warned_and_its_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    from ghoststep.integrations.attached import Attached

    model, optimizer = pair()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    callback = Attached(policy={"GS401": "skip-step"}, strict=True)
    (warning,) = told(lambda: callback.begin(model, [other]))
    assert "leave the optimizer out" in str(warning.message)
    assert warning.filename == __file__
    train(model, other)
    callback.end()
    report = callback.report()
    assert {v.outcome for v in report.verdicts} <= {Outcome.UNKNOWN, Outcome.NOT_APPLICABLE}
    assert report.exit_code == 2
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        callback.begin(model, [other])
    assert "leave the optimizer out" in caplog.text
    assert told(lambda: callback.begin(model, [optimizer])) == []
    callback.end()
    assert optimizer.param_groups
