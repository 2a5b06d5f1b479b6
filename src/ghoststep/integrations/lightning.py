"""Lightning's Trainer, with automatic or manual optimization.

    from ghoststep.integrations.lightning import GhoststepCallback

    seen = GhoststepCallback(run_dir="runs/a", policy={"GS401": "stop"}, sinks=["tensorboard:runs/a/tb"])
    lightning.Trainer(..., callbacks=[seen]).fit(module, loader)
    print(seen.report())

Lightning runs the backward pass inside the optimizer's step, so a policy "skip-step" cannot work here and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghoststep.finding import Report
from ghoststep.integrations.attached import Attached

if TYPE_CHECKING:
    Callback: Any = object
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class GhoststepCallback(Callback):  # type: ignore[misc]
    """Watches every `fit` of a Trainer. Arguments are those of `ghoststep.watch`, without model and optimizer.

    Parameters are named as in the LightningModule ("model.layers.0..."). Under a policy "stop" Lightning ends after the batch
    (`trainer.should_stop`; `min_steps` and `min_epochs` still hold).
    """

    def __init__(
        self, *, run_dir: str | Path | None = None, policy: str | Mapping[str, str] | None = None, sinks: Sequence[Any] = (),
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._attached = Attached(run_dir=run_dir, policy=policy, sinks=sinks, **options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Starts the watch: the optimizers exist by now, and the sanity check is over."""
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._attached.begin(
            pl_module, trainer.optimizers, scheduler=schedulers[0] if len(schedulers) == 1 else None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
        )  # fmt: skip

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ends the training if the policy says so."""
        if self._attached.should_stop:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Flushes and closes."""
        self._attached.end()
        self._attached.raise_pending()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Flushes and closes, and lets the exception be the one that is seen."""
        self._attached.end()

    def close(self) -> None:
        """Finish the record. Not needed where `fit` ended by itself."""
        self._attached.end()

    def report(self) -> Report:
        """Every check's verdict about the last training; also while it runs."""
        return self._attached.report()
