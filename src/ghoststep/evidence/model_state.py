"""What a model in memory shows before anything runs: values that are no numbers, and the mode it is in."""

from __future__ import annotations

from dataclasses import dataclass

from ghoststep.evidence.base import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteParameter:
    """A parameter with values that are NaN or infinite: how many of each, of `num_elements`."""

    name: str
    num_nan: int
    num_infinite: int
    num_elements: int
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState(Evidence):
    """Every parameter that can be read as numbers was looked at.

    nonfinite: those with NaN or infinity, in the model's order; a tied one once. num_parameters: parameters looked at.
    unread: names of those that could not be (on the meta device, sharded or quantised).
    training: `model.training` as handed over. trains_in_loss: the same while the loss calls the model; None if it was not seen.
    dropouts: modules with a dropout above 0 that are in evaluation mode as handed over. has_optimizer, has_train_step: given.
    """

    nonfinite: tuple[NonfiniteParameter, ...]
    num_parameters: int
    unread: tuple[str, ...]
    training: bool
    trains_in_loss: bool | None
    dropouts: tuple[str, ...]
    has_optimizer: bool
    has_train_step: bool
