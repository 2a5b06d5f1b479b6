"""A contrastive loss driven with chosen embeddings: what it can reach at best, and what it uses as negatives.

Shapes: B examples, D dimensions. No forward of the model is run; the loss alone is evaluated a few hundred times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook
from ghoststep.evidence.contrastive import ContrastiveForm, ContrastiveXray
from ghoststep.evidence.training import ContrastiveProbe
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.embedding_seam import FedLoss, floats
from ghoststep.instruments.live.xray_contrastive import coupled_seam
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

NUM_ITERATIONS = 200


@instrument
def contrastive_probe(setup: Setup, call: LiveCall, xray: ContrastiveXray) -> ContrastiveProbe:
    """Find the smallest loss that any embeddings reach, and which targets each example is pushed away from.

    `CannotLook` where the loss is no function of similarities.
    Cost: two forwards without activations; 400 evaluations of the loss on [B, D] tensors.
    """
    if xray.form is ContrastiveForm.OTHER:
        raise CannotLook(f"the loss is {xray.form.value}: what it pulls together could not be read")
    seam = coupled_seam(setup, call, across_examples=True)
    groups, num_groups = _groups(xray)
    num = len(xray.anchors) // (2 if xray.is_symmetric and len(seam.values) > 1 else 1) or int(seam.values[0].shape[0])
    with FedLoss(setup, seam).open() as loss:
        norm = _common_norm(seam.values)
        reached = _floors(loss, seam.values, norm, _codes(num_groups, int(seam.values[0].shape[-1]))[groups], xray)
        is_learnable = _has_learnable_scale(loss, seam.values, call)
    duplicates = _duplicates(xray, int(seam.values[0].shape[0]))
    return ContrastiveProbe(
        num_examples=num, floor=reached.floor, free_floor=reached.free, collapsed=reached.collapsed,
        is_learnable=is_learnable, scale=reached.scale,
        duplicates=duplicates or (), duplicates_looked_at=duplicates is not None,
    )  # fmt: skip


def _groups(xray: ContrastiveXray) -> tuple[list[int], int]:
    """For each embedding the group of those that the loss pulls together, and how many groups there are."""
    group = list(range(len(xray.pull_NN)))
    for anchor in xray.anchors:
        for other in anchor.positives:
            one, two = group[anchor.index], group[other]
            group = [one if g == two else g for g in group]
    names = sorted(set(group))
    return [names.index(g) for g in group], len(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Floors:
    floor: float
    free: float
    collapsed: float
    scale: float


def _has_learnable_scale(loss: FedLoss, values: Sequence[torch.Tensor], call: LiveCall) -> bool:
    """True if the loss depends on a trainable parameter beside the embeddings, or on a number that the model returns from one."""
    if loss([v.float() for v in values]).requires_grad:
        return True
    has_number = any(v.numel() == 1 for one in call.calls for v in floats(one.output))
    return has_number and any(p.requires_grad and p.numel() == 1 for p in call.core.parameters())


def _common_norm(values: Sequence[torch.Tensor]) -> float | None:
    """The norm that all [B, D] embeddings have, or None where norms differ (then their length is free)."""
    import torch

    if any(v.dim() != 2 for v in values):
        return None
    norms = torch.cat([v.float().norm(dim=1) for v in values])
    mean = float(norms.mean())
    return mean if mean > 0 and float((norms - mean).abs().max()) < 5e-3 * mean else None


def _codes(num: int, dims: int) -> torch.Tensor:
    """Unit vectors as far apart as is simple: a simplex, a cross-polytope, or random ones."""
    import torch

    if num <= dims + 1:
        simplex = torch.eye(num) - 1 / num
        padded = torch.zeros(num, max(dims, num))
        padded[:, :num] = simplex
        if num == dims + 1:  # the simplex lies in a plane of one dimension less
            basis = torch.linalg.svd(simplex)[2][: num - 1]
            padded = simplex @ basis.T
        codes = padded[:, :dims]
    elif num <= 2 * dims:
        codes = torch.cat([torch.eye(dims), -torch.eye(dims)])[:num]
    else:
        codes = torch.randn(num, dims, generator=torch.Generator().manual_seed(20))
    unit: torch.Tensor = codes / codes.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return unit


def _like(codes: torch.Tensor, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The codes [N, D] cut into the shapes of the outputs: over all T positions of [B, T, D]."""
    import torch

    parts = torch.split(codes, [v.shape[0] for v in values])
    placed = [p if v.dim() == 2 else p[:, None, :].expand(-1, v.shape[1], -1) for p, v in zip(parts, values, strict=True)]
    return [p.to(v.device).clone() for p, v in zip(placed, values, strict=True)]


def _floors(
    loss: FedLoss, values: Sequence[torch.Tensor], norm: float | None, codes: torch.Tensor, xray: ContrastiveXray
) -> _Floors:
    """The smallest loss with embeddings of the measured length, with free length, the loss of equal ones, and the scale."""
    import torch

    size = norm if norm is not None else max(float(v.float().norm(dim=-1).mean()) for v in values)
    equal = (torch.ones_like(codes) / math.sqrt(codes.shape[1])) * size
    with torch.no_grad():
        collapsed = float(loss(_like(equal, values)))
        perfect = float(loss(_like(codes * size, values)))
        longer = float(loss(_like(2 * codes * size, values)))
    ignores_length = xray.is_cosine or abs(longer - perfect) <= 1e-5 * max(1.0, abs(perfect))
    best = min(perfect, _descend(loss, _like(codes * size, values), size, norm))
    scale = xray.scale if norm is not None or ignores_length else math.nan
    if norm is None or ignores_length:
        free = best if not ignores_length else _sharp(xray)
    else:
        free = min(best, _descend(loss, _like(30 * codes * size, values), 30 * size, None))
    return _Floors(floor=best, free=free, collapsed=collapsed, scale=scale)


def _sharp(xray: ContrastiveXray) -> float:
    """What an infinitely sharp softmax leaves: ln of the number of positives of each anchor; NaN for other losses."""
    if math.isnan(xray.scale):
        return math.nan
    return sum(a.weight * math.log(max(1, len(a.positives))) for a in xray.anchors)


def _descend(loss: FedLoss, start: Sequence[torch.Tensor], size: float, norm: float | None) -> float:
    """The smallest loss on the way down from these embeddings, kept at `norm` if it is given."""
    import torch

    leaves = [v.requires_grad_(True) for v in start]
    optimizer = torch.optim.Adam(leaves, lr=0.05 * size)
    best = math.inf
    for i in range(NUM_ITERATIONS):
        optimizer.zero_grad()
        value = loss(leaves)
        if not bool(torch.isfinite(value)):
            break
        best = min(best, float(value.detach()))
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.param_groups[0]["lr"] = 0.05 * size * (1 - i / NUM_ITERATIONS)
        optimizer.step()
        if norm is not None:
            with torch.no_grad():
                for leaf in leaves:
                    leaf.mul_(norm / leaf.norm(dim=-1, keepdim=True).clamp(min=1e-12))
    return best


def _duplicates(xray: ContrastiveXray, num: int) -> tuple[tuple[int, int], ...] | None:
    """(i, j): example i is pushed away from a target whose input equals a target that i is pulled to. None: not looked at."""
    texts, pull_NN = xray.text_N, xray.pull_NN
    if texts is None:
        return None
    found = set()
    for query in range(len(texts)):
        positives = {texts[t] for t in (pull_NN[query] < 0).nonzero()[0]}
        for target in (pull_NN[query] > 0).nonzero()[0].tolist():
            if texts[target] in positives:
                found.add((query % num, target % num))
    return tuple(sorted(found))
