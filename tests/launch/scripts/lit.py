"""Lightning, which runs the backward inside `optimizer.step(closure)` and never calls its module's forward."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import lightning
import torch
from tests.launch.scripts.toys import batches, digest, loss_of, model

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Lit(lightning.LightningModule):
    """The toy, with parts called on their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = model()

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        return loss_of(self.gates(ids), ids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Batches:
    """Any iterable will do."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return batches(12, 12)


lit = Lit()
trainer = lightning.Trainer(
    max_epochs=1, gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, accelerator="cpu", devices=1,
)  # fmt: skip
trainer.fit(lit, Batches())
print(digest(lit))
