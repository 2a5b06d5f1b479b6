"""Where a pooled vector comes from: which positions' hidden states the loss reads. B examples, T positions, D dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.equivalence import PooledExample, Pooling
from ghoststep.instruments.live.batch_facts import runs_at_the_ends
from ghoststep.instruments.live.calling import LiveCall, compute_loss, eager, is_varied
from ghoststep.instruments.live.influence_hooks import hidden_tensor
from ghoststep.instruments.live.influence_intent import returns_vectors
from ghoststep.instruments.live.untouched import untouched
from ghoststep.instruments.live.users_errors import users_code
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

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
    total, num_unmatched = 0, 0
    for leaf in leaves:
        if leaf.tensor.grad is None:
            continue
        offset = _offset(batch, leaf.ids_BT)
        padding_BT = _padding(batch, leaf.ids_BT, offset)
        if padding_BT is None:
            num_unmatched += 1
            continue
        kinds = [_kind(g) for g in leaf.tensor.grad.detach().float().cpu()]
        if any(k == "" for k in kinds):
            raise DoesNotApply("the loss reads single positions with gradients of their own: nothing is pooled")
        total += len(kinds)
        for b, kind in enumerate(kinds):
            entry = _example(padding_BT[b], (offset or 0) + b, kind, leaf.tensor.grad[b])
            if entry is not None:
                found.append(entry)
    if not found:
        raise CannotLook("no hidden state of a padded example was seen to reach the loss")
    if num_unmatched and not any(f.num_padding for f in found):
        raise CannotLook(
            "hidden states of more texts than the first look-up's reach the loss (another tower?), and without a pad_token_id nothing "
            "says where those are padded"
        )
    return Pooling(examples=tuple(found), num_examples=total, padding_source=batch.padding_source, num_forward=1)


def _cut_and_run(setup: Setup, call: LiveCall) -> list[_Leaf]:
    import torch

    leaves: list[_Leaf] = []
    current: list[torch.Tensor] = []
    only_looked_up = [True]

    def other_tower(module: torch.nn.Module, ids: torch.Tensor) -> bool:
        # Tags and types are looked up beside the tokens; tokens of another text are, once layers have run over the first one.
        return not only_looked_up[0] and _looks_up(module, ids) and is_varied(ids)

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        ids = args[0] if args else None
        if isinstance(ids, torch.Tensor) and ids.dim() == 2 and (module is call.embedding or other_tower(module, ids)):
            current[:] = [ids.detach().cpu()]
            only_looked_up[:] = [True]
        elif getattr(module, "weight", None) is not None and not _looks_up(module, ids):
            only_looked_up[:] = [False]
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


def _looks_up(module: torch.nn.Module, given: Any) -> bool:
    import torch

    weight = getattr(module, "weight", None)
    is_table = isinstance(weight, torch.Tensor) and weight.dim() == 2
    return is_table and isinstance(given, torch.Tensor) and not given.is_floating_point()


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


def _padding(batch: BatchFacts, ids_BT: torch.Tensor, offset: int | None) -> NDArray[np.bool_] | None:
    """Padding of these ids: that of the batch facts from `offset` on, or, of another tower's texts, runs of the pad id."""
    rows, time = ids_BT.shape
    if offset is not None and batch.padding_BT is not None:
        return batch.padding_BT[offset : offset + rows, :time]
    if batch.pad_id is None or batch.pad_id in batch.eos_ids:
        return None
    return runs_at_the_ends(ids_BT.long().numpy(), None, batch.pad_id, is_stop=False)


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


def _example(padding: NDArray[np.bool_], example: int, kind: str, gradient_TD: torch.Tensor) -> PooledExample | None:
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
