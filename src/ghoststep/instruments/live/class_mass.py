"""The probability that the model's own softmax gives to classes without a token. N positions, V classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.loss import ClassMass, LossXray
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

CHUNK_ELEMENTS = 1 << 22


@instrument
def class_mass(setup: Setup, call: LiveCall, batch: BatchFacts | Missing, xray: LossXray | Missing) -> ClassMass:
    """Softmax the logits that the loss's own run returned, a few positions at a time. Cost: no pass; memory of one chunk."""
    import torch

    if setup.tokenizer is None:
        raise CannotLook("the setup has no tokenizer: nothing says which output rows have a token")
    if call.logits is None:
        raise CannotLook("the model returns no logits")
    logits = call.logits
    num_classes = int(logits.shape[-1])
    known = _token_ids(setup.tokenizer)
    without = torch.ones(num_classes, dtype=torch.bool)
    without[[i for i in known if 0 <= i < num_classes]] = False
    ids = without.nonzero().flatten()
    flat = logits.reshape(-1, num_classes)
    chosen, target = _positions(flat.shape[0], batch, xray)
    if not ids.numel():
        return ClassMass(
            num_classes=num_classes, num_tokens=num_classes, first_class=-1, last_class=-1, num_without_token=0, mass=0.0,
            uniform_mass=0.0, top_class=-1, top_mass=0.0, mean_loss=float("nan"), real_loss=float("nan"), num_positions=0,
        )  # fmt: skip
    total_V = torch.zeros(ids.numel(), dtype=torch.float64)
    loss, real = [], []
    step = max(1, CHUNK_ELEMENTS // num_classes)
    for start in range(0, chosen.numel(), step):
        which = chosen[start : start + step]
        logp = flat[which.to(flat.device)].double().cpu().log_softmax(-1)
        total_V += logp[:, ids].exp().sum(0)
        if target is not None:
            picked = logp.gather(-1, target[which][:, None])[:, 0]
            loss.append(-picked)
            real.append(-picked + logp.masked_fill(without, -torch.inf).logsumexp(-1))
    mean_V = total_V / max(1, chosen.numel())
    top = int(mean_V.argmax())
    return ClassMass(
        num_classes=num_classes, num_tokens=num_classes - int(ids.numel()), first_class=int(ids[0]), last_class=int(ids[-1]),
        num_without_token=int(ids.numel()), mass=float(mean_V.sum()), uniform_mass=ids.numel() / num_classes,
        top_class=int(ids[top]), top_mass=float(mean_V[top]), mean_loss=_mean(loss), real_loss=_mean(real),
        num_positions=int(chosen.numel()),
    )  # fmt: skip


def _mean(parts: list[torch.Tensor]) -> float:
    import torch

    return float(torch.cat(parts).mean()) if parts else float("nan")


def _token_ids(tokenizer: Any) -> set[int]:
    try:
        return {int(i) for i in tokenizer.get_vocab().values()}
    except Exception as error:  # a stranger's tokenizer may raise anything
        raise CannotLook(f"the tokenizer gives no vocabulary: {type(error).__name__}: {error}") from error


def _positions(num: int, batch: BatchFacts | Missing, xray: LossXray | Missing) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Which rows of the logits to average over (supervised ones, else real ones, else all) and their targets if known."""
    import torch

    if isinstance(xray, LossXray) and xray.weight_BT.size == num and bool((xray.weight_BT != 0).any()):
        supervised = torch.from_numpy(xray.weight_BT.reshape(-1) != 0)
        target = torch.from_numpy(xray.target_BT.reshape(-1)) if xray.kind.is_likelihood else None
        return supervised.nonzero().flatten(), target
    if isinstance(batch, BatchFacts) and batch.padding_BT is not None and batch.padding_BT.size == num:
        return torch.from_numpy(~batch.padding_BT.reshape(-1)).nonzero().flatten(), None
    return torch.arange(num), None
