"""A contrastive loss driven with chosen embeddings: what it can reach at best, and what it uses as negatives.

Shapes: B examples, D dimensions. No forward of the model is run; the loss alone is evaluated a few hundred times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.training import ContrastiveProbe
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.fed_outputs import Embeddings, FedLoss, find_embeddings, floats
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

NUM_ITERATIONS = 200
MAX_EXAMPLES = 1024


@instrument
def contrastive_probe(setup: Setup, call: LiveCall) -> ContrastiveProbe:
    """Find the smallest loss that any embeddings reach, and which targets each example is pushed away from.

    Contrastive is what couples examples: the gradient at example 0's embedding changes when another example's embedding does.
    `DoesNotApply` for any other loss, `CannotLook` where embeddings are not [B, D] outputs of the model.
    Cost: no forward; 400 evaluations of the loss on [B, D] tensors.
    """
    found = find_embeddings(call)
    if not found.places or setup.intent in ("causal", "prefix", "masked", "seq2seq", "rl"):
        if setup.intent == "contrastive":
            raise CannotLook("the model returns no [examples, dimensions] embeddings from its forward")
        raise DoesNotApply("no contrastive loss: the model returns no embeddings of whole examples")
    if found.values[0].shape[0] > MAX_EXAMPLES:
        raise CannotLook(f"{found.values[0].shape[0]} examples in the batch; at most {MAX_EXAMPLES} are looked at")
    with FedLoss(setup, call, found.places).open() as loss:
        used = _used(loss, found)
        found = Embeddings(
            places=tuple(p for p, u in zip(found.places, used, strict=True) if u),
            values=tuple(v for v, u in zip(found.values, used, strict=True) if u),
        )
    if not found.places:
        raise DoesNotApply("no contrastive loss: it is not computed from the model's [examples, dimensions] outputs")
    with FedLoss(setup, call, found.places).open() as loss:
        if not _couples(loss, found.values):
            raise DoesNotApply("no contrastive loss: each example's gradient is its own")
        norm = _common_norm(found.values)
        reached = _floors(loss, found.values, norm)
        duplicates = _duplicates(loss, found.values, call, norm)
        is_learnable = _has_learnable_scale(loss, found.values, call)
    return ContrastiveProbe(
        num_examples=int(found.values[0].shape[0]), floor=reached.floor, free_floor=reached.free, collapsed=reached.collapsed,
        is_normalised=norm is not None, is_learnable=is_learnable, scale=reached.scale, duplicates=duplicates or (),
        duplicates_looked_at=duplicates is not None,
    )  # fmt: skip


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


def _gradients(loss: FedLoss, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    import torch

    leaves = [v.detach().clone().requires_grad_(True) for v in leaves]
    value = loss(leaves)
    if not value.requires_grad:
        return [torch.zeros_like(v) for v in leaves]
    given = torch.autograd.grad(value, leaves, allow_unused=True)
    return [torch.zeros_like(v) if g is None else g for g, v in zip(given, leaves, strict=True)]


def _used(loss: FedLoss, found: Embeddings) -> list[bool]:
    return [bool((g != 0).any()) for g in _gradients(loss, [v.float() for v in found.values])]


def _couples(loss: FedLoss, values: Sequence[torch.Tensor]) -> bool:
    before = _gradients(loss, [v.float() for v in values])
    moved = []
    for v in values:
        other = v.float().clone()
        other[-1] = -other[-1] + other[0]
        moved.append(other)
    after = _gradients(loss, moved)
    change = max(float((a[0] - b[0]).norm()) for a, b in zip(after, before, strict=True))
    size = max(float(b[0].norm()) for b in before)
    return change > 1e-4 * max(size, 1e-12)


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


def _like(codes: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The codes [B, D] in the shape of an output: over all T positions of [B, T, D]."""
    placed = codes if value.dim() == 2 else codes[:, None, :].expand(-1, value.shape[1], -1)
    return placed.to(value.device).clone()


def _floors(loss: FedLoss, values: Sequence[torch.Tensor], norm: float | None) -> _Floors:
    """The smallest loss with embeddings of the measured length, with free length, the loss of equal ones, and the scale."""
    import torch

    num, dims = values[0].shape[0], values[0].shape[-1]
    size = norm if norm is not None else max(float(v.float().norm(dim=-1).mean()) for v in values)
    codes = _codes(num, dims) * size
    equal = (torch.ones(1, dims) / math.sqrt(dims) * size).expand(num, dims)
    with torch.no_grad():
        collapsed = float(loss([_like(equal, v) for v in values]))
        perfect = float(loss([_like(codes, v) for v in values]))
        longer = float(loss([_like(2 * codes, v) for v in values]))
    ignores_length = abs(longer - perfect) <= 1e-5 * max(1.0, abs(perfect))
    best = min(perfect, _descend(loss, [_like(codes, v) for v in values], size, norm))
    scale = _scale(codes / size, perfect, collapsed) if norm is not None or ignores_length else math.nan
    if norm is None:
        free = best if not ignores_length else 0.0 if not math.isnan(scale) else math.nan
    else:
        free = min(best, _descend(loss, [_like(30 * codes, v) for v in values], 30 * size, None))
    return _Floors(floor=best, free=free, collapsed=collapsed, scale=scale)


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


def _scale(codes: torch.Tensor, perfect: float, collapsed: float) -> float:
    """The logit scale of a softmax over cosines, from the loss of known codes; NaN for any other loss."""
    import torch

    num = len(codes)
    if not abs(collapsed - math.log(num)) < 1e-3 * math.log(num) or not 0 < perfect < collapsed:
        return math.nan
    gaps = codes @ codes.T - 1
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        reached = float(torch.logsumexp(middle * gaps.double(), dim=1).mean())
        low, high = (middle, high) if reached > perfect else (low, middle)
    return (low + high) / 2


def _duplicates(
    loss: FedLoss, values: Sequence[torch.Tensor], call: LiveCall, norm: float | None
) -> tuple[tuple[int, int], ...] | None:
    """(i, j): example i is pushed away from a target whose input equals a target that i is pulled to. None: not looked at."""
    import torch

    num, dims = values[0].shape[0], values[0].shape[-1]
    inputs = _inputs(call, num, len(values))
    if inputs is None:
        return None
    total = num * len(values)
    size = norm if norm is not None else 1.0
    codes = torch.eye(total, max(total, dims)) * size  # orthogonal codes: each gradient splits exactly
    leaves = [_like(codes[i * num : (i + 1) * num], v) for i, v in enumerate(values)]
    try:
        gradients = torch.cat([g if g.dim() == 2 else g.sum(dim=1) for g in _gradients(loss, leaves)])
    except (RuntimeError, CannotLook):  # the loss has weights of its own for D dimensions
        return None
    pull_QT = gradients.cpu() @ codes.T
    pull_QT.fill_diagonal_(0.0)
    limit = 1e-6 * float(pull_QT.abs().max())
    found = set()
    for query in range(total):
        positives = {inputs[t] for t in (pull_QT[query] < -limit).nonzero().flatten().tolist()}
        for target in (pull_QT[query] > limit).nonzero().flatten().tolist():
            same_target = inputs[target] in positives
            i, j = query % num, target % num
            if same_target and (i != j or query // num != target // num):
                found.add((i, j))
    return tuple(sorted(found))


def _inputs(call: LiveCall, num: int, num_leaves: int) -> list[bytes] | None:
    """The token ids behind each embedding, in the order of the leaves; None where they cannot be matched."""
    ids = [i for i in call.ids if i.dim() >= 1]
    if len(ids) == num_leaves and all(i.shape[0] == num for i in ids):
        return [row.cpu().numpy().tobytes() for one in ids for row in one]
    if len(ids) == 1 and num_leaves == 1 and ids[0].shape[0] == num:
        return [row.cpu().numpy().tobytes() for row in ids[0]]
    return None
