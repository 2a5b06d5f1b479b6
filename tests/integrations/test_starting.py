"""What a callback takes and refuses before a training, and what it never does to one."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ghoststep.errors import UsageError
from ghoststep.finding import Outcome
from ghoststep.watching.policy import GhoststepWarning
from tests.integrations.runs import Stream, batches, healthy, optimizer_of, transformers
from tests.integrations.test_every_trainer import bad

torch.set_num_threads(1)


def trainer(folder: Path, callback: Any, *, optimizer: Any = None, processing: Any = None) -> Any:
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    model = healthy()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=Stream(batches(4)), optimizers=(optimizer or optimizer_of(model), None),
        callbacks=[callback], processing_class=processing,
    )  # fmt: skip


def callbacks() -> list[Any]:
    from ghoststep.integrations.transformers import GhoststepCallback

    kinds: list[Any] = [GhoststepCallback]
    try:
        from ghoststep.integrations import lightning
    except ImportError:
        return kinds
    return [*kinds, lightning.GhoststepCallback]


@pytest.mark.parametrize("kind", callbacks())
def test_a_callback_refuses_what_cannot_be_used_when_it_is_made(kind: Any) -> None:
    for options, expected in (
        ({"flush_step": 3}, "no argument 'flush_step'"),
        ({"model": healthy()}, "no argument 'model'"),
        ({"tokenizer": "gpt2"}, "from_pretrained"),
        ({"run_dir": 7}, "run_dir is the number 7"),
        ({"policy": 3}, "policy is the number 3"),
        ({"sinks": 7}, "sinks is the number 7"),
    ):
        with pytest.raises(UsageError, match=expected):
            kind(**options)


def test_a_training_that_never_began_is_no_reason_to_warn(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for kind in callbacks():
            callback = kind(run_dir=tmp_path / "run", sinks=(s for s in [f"jsonl:{tmp_path}/steps.jsonl"]))
            if kind is callbacks()[0]:
                made = trainer(tmp_path, callback)
                del made
            callback.close()
            with pytest.raises(UsageError, match="no training yet"):
                callback.report()
            del callback
        gc.collect()
    assert not [w for w in seen if issubclass(w.category, GhoststepWarning)]
    assert not (tmp_path / "run").exists()


def test_an_optimizer_of_another_model_is_a_warning_and_the_training_goes_on(tmp_path: Path) -> None:
    from ghoststep.integrations.transformers import GhoststepCallback

    callback = GhoststepCallback()
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    trained = trainer(tmp_path, callback, optimizer=other)
    with pytest.warns(GhoststepWarning, match="holds 2 tensors, and none of them is a trainable parameter") as seen:
        trained.train()
    (warning,) = [w for w in seen if issubclass(w.category, GhoststepWarning)]
    assert warning.filename == __file__
    assert trained.state.global_step == 4
    assert all(v.outcome in (Outcome.UNKNOWN, Outcome.NOT_APPLICABLE) for v in callback.report().verdicts)


class Images:
    """A processor of images: no tokens, no vocabulary."""

    model_input_names = ("pixel_values",)

    def save_pretrained(self, folder: str) -> None: ...


def test_what_is_no_tokenizer_is_left_out(tmp_path: Path) -> None:
    from ghoststep.integrations.transformers import GhoststepCallback

    callback = GhoststepCallback()
    with warnings.catch_warnings():
        warnings.simplefilter("error", GhoststepWarning)
        trainer(tmp_path, callback, processing=Images()).train()
    assert not bad(callback.report())
    assert callback.report().subjects[0].facts["steps"] == 4
