"""Running the user's own loss so that its graph ends at a fed leaf, with everything put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.instruments.live.calling import compute_loss, eager
from ghoststep.instruments.live.kept_batches import fresh
from ghoststep.instruments.live.side_state import side_state
from ghoststep.instruments.live.untouched import untouched
from ghoststep.subjects.setup import Setup
from ghoststep.subjects.setup_batches import Batch

if TYPE_CHECKING:
    import torch


class _CapturedError(BaseException):
    """Leaves a train_step at its first backward; not an Exception, so that no handler of the user's swallows it."""


@contextlib.contextmanager
def frozen(setup: Setup) -> Iterator[None]:
    """Eager, gradients on, but no parameter asks for one: only what is fed makes a graph, and no activation is kept.

    Everything is restored on leaving, bit for bit (`untouched`). DDP does not prepare its reducer.
    """
    import torch

    no_sync: Callable[[], Any] | None = getattr(setup.model, "no_sync", None)
    with untouched(setup), eager(), torch.enable_grad(), no_sync() if no_sync else contextlib.nullcontext():
        for p in setup.model.parameters():
            p.requires_grad_(False)
        yield


def loss_graph(setup: Setup, batch: Batch) -> torch.Tensor:
    """The user's scalar loss with its graph: of `loss_fn`, else what `train_step` calls backward on, else the model's own.

    A train_step is left at its first backward: no optimizer, scaler or scheduler step is taken. What it logs is not seen.
    """
    if setup.loss_fn is not None or setup.train_step is None:
        return compute_loss(setup, batch)
    return _captured(setup, batch)


def _captured(setup: Setup, batch: Batch) -> torch.Tensor:
    import torch

    caught: list[torch.Tensor] = []

    def keep(loss: Any, *_: Any, **__: Any) -> None:
        caught.append(loss[0] if isinstance(loss, (tuple, list)) else loss)
        raise _CapturedError

    method, function = torch.Tensor.backward, torch.autograd.backward
    step = getattr(setup.optimizer, "step", None)
    scaler = setup.scaler
    own = vars(scaler).get("scale") if scaler is not None else None
    try:
        torch.Tensor.backward = keep  # type: ignore[method-assign, assignment]
        torch.autograd.backward = keep  # type: ignore[assignment]
        if step is not None:
            setup.optimizer.step = lambda closure=None, *_, **__: closure() if closure is not None else None
        if scaler is not None:
            scaler.scale = lambda value: value
        assert setup.train_step is not None
        with side_state(setup, (setup.train_step,)):
            setup.train_step(setup.model, setup.optimizer, fresh(batch))
    except _CapturedError:
        pass
    finally:
        torch.Tensor.backward = method  # type: ignore[method-assign]
        torch.autograd.backward = function
        if step is not None:
            _put_back(setup.optimizer, "step", step)
        if scaler is not None:
            vars(scaler).pop("scale", None)
            if own is not None:
                scaler.scale = own
    if not caught:
        raise CannotLook("train_step never called backward, so the loss it trains on was not seen; give loss_fn(model, batch)")
    if caught[0].numel() != 1:
        raise CannotLook(f"train_step calls backward on a tensor of shape {tuple(caught[0].shape)}; expected a scalar")
    return caught[0].reshape(())


def _put_back(owner: Any, name: str, value: Any) -> None:
    """Undo an assignment on an instance: delete it where the class has the same, else set the former value again."""
    vars(owner).pop(name, None)
    if getattr(owner, name, None) != value:
        setattr(owner, name, value)
