"""What only transformers' Trainer has: a bound of 0, warm-up, a training that raises, training again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ghoststep.errors import UsageError
from ghoststep.finding import Outcome
from ghoststep.subjects.run import open_run
from tests.integrations.runs import Stream, batches, healthy, poisoned, transformers, with_lightning, with_trainer
from tests.integrations.test_every_trainer import bad

torch.set_num_threads(1)


def test_max_grad_norm_of_0_is_named_as_the_cause(tmp_path: Path) -> None:
    ran = with_trainer(poisoned(), batches(6, guilty=[2]), tmp_path, max_grad_norm=0)
    assert ran.report is not None
    verdict = ran.report.verdict("nan-by-infinite-clip")
    assert verdict.outcome is Outcome.FOUND
    assert verdict.findings[0].where.step == 3
    assert ran.log[-1]["train_loss"] < 6  # the Trainer filters NaN out of its loss


def test_max_grad_norm_of_0_on_a_healthy_model_is_silent(tmp_path: Path) -> None:
    assert not bad(with_trainer(healthy(), batches(12), tmp_path, max_grad_norm=0).report)


def test_in_strict_mode_the_step_is_skipped_and_the_weights_live(tmp_path: Path) -> None:
    model = poisoned()
    ran = with_trainer(
        model,
        batches(6, guilty=[2]),
        tmp_path,
        max_grad_norm=0,
        policy={"GS401": "skip-step", "GS403": "skip-step"},
        strict=True,
    )
    assert ran.steps == 6
    assert all(p.isfinite().all() for p in model.parameters())


def test_lightning_refuses_to_skip(tmp_path: Path) -> None:
    model = healthy()
    start = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UsageError, match="closure"):
        with_lightning(model, batches(2), tmp_path, policy={"GS401": "skip-step"}, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))


def test_warm_up_from_0_and_decay_to_0_are_silent(tmp_path: Path) -> None:
    assert not bad(with_trainer(healthy(), batches(30), tmp_path, scheduler="cosine").report)


def test_a_training_that_raises_is_recorded_and_the_next_one_is_watched_afresh(tmp_path: Path) -> None:
    from ghoststep.integrations.transformers import GhoststepCallback
    from ghoststep.watching import patches

    seen, listening = GhoststepCallback(run_dir=tmp_path / "run"), len(patches._listeners)
    with pytest.raises(UsageError, match="no training yet"):
        seen.report()
    for fails in (True, False):

        class Failing(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, fails: bool = fails, **kwargs: Any) -> None:
                if fails and state.global_step == 3:
                    raise RuntimeError("the user's own")

        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=poisoned(),
            args=arguments,
            train_dataset=Stream(batches(4, guilty=[1] if fails else [])),
            callbacks=[seen, Failing()],
        )
        if fails:
            with pytest.raises(RuntimeError, match="the user's own"):
                trainer.train()
            seen.close()
            assert seen.report().verdict("zeroed-step").outcome is Outcome.FOUND
        else:
            trainer.train()
            assert seen.report().verdict("zeroed-step").outcome is Outcome.CLEAR
            assert seen.report().subjects[0].facts["steps"] == 4
    assert len(patches._listeners) == listening


def test_an_unhandled_exception_in_the_users_script_leaves_a_whole_record(tmp_path: Path) -> None:
    """The Trainer tells no callback that training raised: the last steps are written when the process ends."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, transformers\n"
        "from ghoststep.integrations.transformers import GhoststepCallback\n"
        "from tests.integrations.runs import Stream, batches, poisoned\n"
        "class Failing(transformers.TrainerCallback):\n"
        "    def on_step_end(self, args, state, control, **kwargs):\n"
        "        if state.global_step == 3: sys.exit(7)\n"
        "arguments = transformers.TrainingArguments(\n"
        "    output_dir='out', max_steps=9, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy='no')\n"
        "transformers.Trainer(\n"
        "    model=poisoned(), args=arguments, train_dataset=Stream(batches(9, guilty=[2])),\n"
        "    callbacks=[GhoststepCallback(run_dir='run'), Failing()]).train()\n",
        encoding="utf-8",
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 7, done.stderr
    (rank,) = open_run(str(tmp_path / "run")).read().ranks
    assert rank.record.is_closed
    assert [step.number for step in rank.record.steps] == [1, 2, 3]
    assert "zeroed-step at step 3" in done.stderr
