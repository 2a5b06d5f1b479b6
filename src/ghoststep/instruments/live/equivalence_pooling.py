"""Where a pooled vector comes from: which positions' hidden states the loss reads. B examples, T positions, D dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.equivalence import PooledExample, Pooling
from ghoststep.instruments.live.calling import LiveCall, compute_loss, eager
from ghoststep.instruments.live.influence_intent import returns_vectors
from ghoststep.instruments.live.influence_survey import hidden_tensor
from ghoststep.instruments.live.untouched import untouched
from ghoststep.instruments.live.users_errors import users_code
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

PARALLEL = 1e-3
"""Gradients of two positions are proportional if 1 - |cosine| lies below this."""


@dataclass(slots=True, kw_only=True)
class _Leaf:
    """A cut hidden state [B, T, D] with the token ids looked up before it."""

    ids_BT: torch.Tensor
    tensor: torch.Tensor


@instrument
def pooling(setup: Setup, call: LiveCall, batch: BatchFacts) -> Pooling:
    """Run the user's loss with every hidden state cut off from what made it, and take the gradient at the last ones.

    Cost: one forward; the backward passes through what follows the last hidden state only. Nothing is changed.
    """
    if call.head is not None and not returns_vectors(call):
        raise DoesNotApply("the loss reads an output head position by position: nothing is pooled")
    if batch.padding_BT is None or not batch.padding_BT.any():
        raise DoesNotApply("the first batch has no padding that is known as such")
    leaves = _cut_and_run(setup, call)
    found: list[PooledExample] = []
    total = 0
    for leaf in leaves:
        if leaf.tensor.grad is None:
            continue
        offset = _offset(batch, leaf.ids_BT)
        if offset is None:
            continue
        kinds = [_kind(g) for g in leaf.tensor.grad.detach().float().cpu()]
        if any(k == "" for k in kinds):
            raise DoesNotApply("the loss reads single positions with gradients of their own: nothing is pooled")
        total += len(kinds)
        for b, kind in enumerate(kinds):
            entry = _example(batch, offset + b, kind, leaf.tensor.grad[b])
            if entry is not None:
                found.append(entry)
    if not found:
        raise CannotLook("no hidden state of a padded example was seen to reach the loss")
    return Pooling(examples=tuple(found), num_examples=total, padding_source=batch.padding_source, num_forward=1)


def _cut_and_run(setup: Setup, call: LiveCall) -> list[_Leaf]:
    import torch

    leaves: list[_Leaf] = []
    current: list[torch.Tensor] = []

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if module is call.embedding and args and isinstance(args[0], torch.Tensor) and args[0].dim() == 2:
            current[:] = [args[0].detach().cpu()]
        if not current or not isinstance(output, torch.Tensor):
            return None
        batch, time = current[0].shape
        if tuple(output.shape[:2]) != (batch, time) or hidden_tensor(output, batch, time) is None:
            return None
        leaf = output.detach().requires_grad_(True)
        leaves.append(_Leaf(ids_BT=current[0], tensor=leaf))
        return leaf.clone()

    with untouched(setup), eager():
        for p in setup.model.parameters():
            p.requires_grad_(False)
        handles = [m.register_forward_hook(hook) for n, m in call.core.named_modules() if n]
        try:
            with torch.enable_grad(), users_code():
                loss = compute_loss(setup, setup.batches[0])
            if not loss.requires_grad:
                raise CannotLook(
                    f"what {call.embedding_name} feeds reaches the loss without gradient (a frozen second tower?), and pooling is "
                    "read from gradients; other towers were not looked at"
                )
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            for handle in handles:
                handle.remove()
    return leaves


def _offset(batch: BatchFacts, ids_BT: torch.Tensor) -> int | None:
    """Which example of the batch facts the first of these ids is; None if they are not among them."""
    import numpy as np

    ids = ids_BT.long().numpy()
    rows, time = ids.shape
    if time > batch.ids_BT.shape[1]:
        return None
    for offset in range(0, batch.ids_BT.shape[0] - rows + 1):
        if np.array_equal(batch.ids_BT[offset : offset + rows, :time], ids):
            return offset
    return None


def _kind(gradient_TD: torch.Tensor) -> str:
    """ "single", "mean", "maximum", "none" (no gradient), or "" for positions with gradients of their own."""
    import torch

    norm_T = gradient_TD.norm(dim=-1)
    used = norm_T > 1e-6 * norm_T.max()
    number = int(used.sum())
    if float(norm_T.max()) == 0.0 or number < 2:
        return "single" if number == 1 and float(norm_T.max()) > 0 else "none"
    rows = gradient_TD[used]
    directions = torch.nn.functional.normalize(rows, dim=-1)
    if bool(((directions @ directions[0]).abs() > 1 - PARALLEL).all()):
        return "mean"
    if bool(((rows != 0).sum(dim=0) <= 1).all()):
        return "maximum"
    return ""


def _example(batch: BatchFacts, example: int, kind: str, gradient_TD: torch.Tensor) -> PooledExample | None:
    assert batch.padding_BT is not None
    time = gradient_TD.shape[0]
    padding = batch.padding_BT[example, :time]
    real = (~padding).nonzero()[0]
    if not padding.any() or not len(real) or kind == "none":
        return None
    norm_T = gradient_TD.float().norm(dim=-1).cpu().numpy()
    used = norm_T > 1e-6 * norm_T.max()
    wrong = (used & padding).nonzero()[0]
    position = int(wrong[0]) if len(wrong) else int(used.nonzero()[0][0])
    return PooledExample(
        example=example, kind=kind, num_used=int(used.sum()), num_padding=len(wrong), position=position,
        first_real=int(real[0]), last_real=int(real[-1]),
    )  # fmt: skip
