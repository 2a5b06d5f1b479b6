"""transformers' Trainer, and what is built on it: TRL's SFTTrainer, DPOTrainer, GRPOTrainer.

    from ghoststep.integrations.transformers import GhoststepCallback

    seen = GhoststepCallback(run_dir="runs/a", policy={"GS401": "stop"}, sinks=["tensorboard:runs/a/tb"])
    trainer = Trainer(..., callbacks=[seen])
    trainer.train()
    print(seen.report())

The Trainer's own hooks run after clipping and see only what it left; this callback uses them to begin and to end, and the watch
sees the gradients themselves. `max_grad_norm=0` needs nothing special: the Trainer then clips to infinity to log the norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ghoststep.finding import Report
from ghoststep.integrations.attached import Attached


class GhoststepCallback(TrainerCallback):
    """Watches every `train()` of a Trainer. Arguments are those of `ghoststep.watch`, without model and optimizer.

    Under a policy "stop" the Trainer ends after the step, as if it had reached `max_steps`: it saves and evaluates as usual. A
    training that raises is recorded up to its last step when the process ends, at the next `train()`, or at `close()`.
    """

    def __init__(
        self, *, run_dir: str | Path | None = None, policy: str | Mapping[str, str] | None = None, sinks: Sequence[Any] = (),
        **options: Any,
    ) -> None:  # fmt: skip
        self._attached = Attached(run_dir=run_dir, policy=policy, sinks=sinks, **options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the watch: model and optimizer are prepared by now, and tracking runs are open."""
        processing = kwargs.get("processing_class")
        self._attached.begin(
            kwargs["model"], [kwargs.get("optimizer")], scheduler=kwargs.get("lr_scheduler"),
            tokenizer=getattr(processing, "tokenizer", processing),
        )  # fmt: skip

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ends the training if the policy says so."""
        if self._attached.should_stop:
            control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Flushes and closes."""
        self._attached.end()
        self._attached.raise_pending()

    def close(self) -> None:
        """Finish the record of a training that raised. Otherwise not needed."""
        self._attached.end()

    def report(self) -> Report:
        """Every check's verdict about the last training; also while it runs."""
        return self._attached.report()
