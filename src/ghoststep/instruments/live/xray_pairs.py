"""What a loss does with pairs of embeddings: first and second derivatives at orthogonal ones, and a softmax fitted to them.

N embeddings of all places together, E dimensions of the codes. C_NN: d loss / d similarity of each pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook
from ghoststep.evidence.contrastive import ContrastiveForm

if TYPE_CHECKING:
    import torch

Loss = Callable[[Sequence["torch.Tensor"]], "torch.Tensor"]
_STEP = 1e-3
"""Of the difference quotient, in lengths of a code, where the loss cannot be differentiated twice."""
MAX_DRAWS = 16
MAX_RESIDUAL = 0.01
_ZERO = 1e-6
"""Of the largest: a derivative below is rounding."""


@dataclass(slots=True, kw_only=True)
class Pairs:
    """C_NN symmetric (float64, zero diagonal). anchor_N: bool. weight_N: of an anchor, NaN without a softmax."""

    form: ContrastiveForm
    pull_NN: torch.Tensor
    anchor_N: torch.Tensor
    weight_N: torch.Tensor
    scale: float
    is_symmetric: bool
    is_cosine: bool
    residual: float


class Feed:
    """The user's loss as a function of N embeddings in E dimensions, placed into the shapes that it expects."""

    def __init__(self, loss: Loss, values: Sequence[torch.Tensor]) -> None:
        import torch

        self.values = values
        self.loss = loss
        self.rows = [int(v.shape[0]) for v in values]
        num, dims = sum(self.rows), int(values[0].shape[-1])
        if any(v.shape[-1] != dims for v in values):
            raise CannotLook("the embeddings that the loss compares have different sizes")
        self.codes_NE = torch.eye(num, max(num, dims), dtype=torch.float64)
        self.dtype = torch.float64
        try:
            self.gradient(self.codes_NE)
        except (RuntimeError, TypeError):  # a loss with float32 weights of its own
            self.dtype = torch.float32
            try:
                self.gradient(self.codes_NE)
            except RuntimeError as error:
                text = " ".join(str(error).split())[:160]
                raise CannotLook(f"the loss does not accept {num} orthogonal embeddings in place of its own: {text}") from error

    def leaves(self, codes_NE: torch.Tensor) -> list[torch.Tensor]:
        """The codes cut to the places, repeated over all T positions where the loss pools [B, T, D]."""
        found, start = [], 0
        for v, rows in zip(self.values, self.rows, strict=True):
            part = codes_NE[start : start + rows].to(v.device, self.dtype)
            part = part if v.dim() == 2 else part[:, None, :].expand(-1, v.shape[1], -1)
            found.append(part.clone().requires_grad_(True))
            start += rows
        return found

    def gradient(self, codes_NE: torch.Tensor, *, with_graph: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(d loss / d leaves, leaves)."""
        import torch

        leaves = self.leaves(codes_NE)
        loss = self.loss(leaves)
        if not loss.requires_grad:
            raise CannotLook("the loss does not depend on the embeddings by gradient")
        given = torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=with_graph)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(given, leaves, strict=True)], leaves

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gradients at the places as one float64 matrix [N, E] on the CPU; positions of one example added up."""
        import torch

        return torch.cat([(p if p.dim() == 2 else p.sum(dim=1)).detach().double().cpu() for p in parts])

    def change(self, move_NE: torch.Tensor) -> torch.Tensor:
        """How d loss / d embeddings [N, E] changes when the codes move that way: second derivatives times the move."""
        import torch

        try:
            parts, leaves = self.gradient(self.codes_NE, with_graph=True)
            moves = [m.detach().to(p) for m, p in zip(self.leaves(move_NE), parts, strict=True)]
            total = sum(((p * m).sum() for p, m in zip(parts, moves, strict=True)), torch.zeros((), dtype=self.dtype))
            if not total.requires_grad:
                return torch.zeros_like(self.codes_NE)
            given = torch.autograd.grad(total, leaves, allow_unused=True)
            return self.joined([torch.zeros_like(x) if g is None else g for g, x in zip(given, leaves, strict=True)])
        except RuntimeError:  # differentiable once only (own kernels, gradient caches)
            up, down = (self.joined(self.gradient(self.codes_NE + s * _STEP * move_NE)[0]) for s in (1, -1))
            return (up - down) / (2 * _STEP)


def read_pairs(feed: Feed) -> Pairs:
    """First derivatives, then second ones in directions that bring some positive pairs nearer. Cost: about 8 evaluations."""
    import torch

    codes = feed.codes_NE
    raw_NN = feed.joined(feed.gradient(codes)[0]) @ codes.T
    raw_NN.fill_diagonal_(0.0)
    if not bool(torch.isfinite(raw_NN).all()):
        raise CannotLook("the loss has no finite gradient at orthogonal embeddings")
    # A side whose gradient is stopped (a momentum encoder's keys) shows a pair at the other side only.
    pull_NN = torch.where(raw_NN.abs() >= raw_NN.T.abs(), raw_NN, raw_NN.T)
    pull_NN = torch.where(pull_NN.abs() > _ZERO * pull_NN.abs().max(), pull_NN, 0.0)
    num = pull_NN.shape[0]
    nan_N, none_N = torch.full((num,), torch.nan, dtype=torch.float64), torch.zeros(num, dtype=torch.bool)
    with torch.no_grad():
        one, two = (float(feed.loss([x.detach() for x in feed.leaves(k * codes)])) for k in (1, 2))
        own = _random(num, codes.shape[1], 3)
        near, far = (float(feed.loss([x.detach() for x in feed.leaves(k * own)])) for k in (1, 2))
        turn = torch.linalg.qr(_random(codes.shape[1], codes.shape[1], 4))[0]
        turned = float(feed.loss([x.detach() for x in feed.leaves(own @ turn)]))
    size = max(abs(one), abs(near), 1e-6)
    is_cosine = abs(two - one) + abs(far - near) <= 1e-5 * size
    found = Pairs(
        form=ContrastiveForm.OTHER, pull_NN=pull_NN, anchor_N=none_N, weight_N=nan_N, scale=float("nan"), is_symmetric=False,
        is_cosine=is_cosine, residual=float("nan"),
    )  # fmt: skip
    positive = pull_NN < 0
    if not bool(pull_NN.any()) or abs(turned - near) > 1e-5 * size:
        return found  # a loss of single dimensions (Barlow twins, a classifier of pairs), not of similarities
    curve_N, own_curve, other_curve = _curves(feed, pull_NN, raw_NN)
    found.anchor_N = curve_N < -_ZERO * max(float(curve_N.abs().max()), abs(own_curve), 1e-30)
    if bool(found.anchor_N.any()):
        _fit_softmax(feed, found, torch.where(found.anchor_N, curve_N, 0.0))
        return found
    found.anchor_N = positive.any(1)
    if other_curve > 1e-4 * max(own_curve, float(pull_NN.abs().max())):
        return found
    found.form = ContrastiveForm.PAIRS if own_curve > _ZERO * float(pull_NN.abs().max()) else ContrastiveForm.MARGIN
    return found


def _random(num: int, dims: int, seed: int) -> torch.Tensor:
    import torch

    drawn = torch.randn(num, dims, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(drawn, dim=-1)


def _curves(feed: Feed, pull_NN: torch.Tensor, raw_NN: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """For each embedding: how the push on one of its negatives changes as one of its positives comes nearer (0: not coupled);
    and the largest change of a positive pair's own pull, and of any other pair's.

    Of a softmax over M candidates at equal logits it is -w s^2 / M^2. Each draw moves some of the positive pairs; only pairs
    whose other end has no moved positive count, so that what is seen belongs to one end alone. Ends when each end was seen.
    """
    import torch

    num = pull_NN.shape[0]
    positive = (pull_NN < 0).triu(1)
    total, count = torch.zeros(num, dtype=torch.float64), torch.zeros(num, dtype=torch.float64)
    own, others = 0.0, 0.0
    generator = torch.Generator().manual_seed(11)
    both = positive | positive.T
    stopped_N = raw_NN.abs().sum(1) == 0
    share = 0.5 / max(1, int(both.sum(1).max()))
    wanted = both.any(1) & (pull_NN > 0).any(1)
    for draw in range(MAX_DRAWS):
        if draw and not bool((wanted & (count == 0)).any()):
            break
        picked = positive & (torch.rand(num, num, generator=generator) < share)
        if not bool(picked.any()):
            continue
        pairs_NN = (picked | picked.T).double()
        # The later one of each pair moves towards the earlier one, unless its gradient is stopped.
        towards_NN = (picked & ~stopped_N[None, :]).T.double() + (picked & stopped_N[None, :]).double()
        move_NE = towards_NN @ feed.codes_NE
        changed_NN = feed.change(move_NE) @ feed.codes_NE.T
        # A code that moved carries the first-order pull of its pairs along: not a change of the loss.
        changed_NN = changed_NN - raw_NN @ towards_NN
        num_moved = pairs_NN.sum(1)
        counts = (pull_NN > 0) & (num_moved == 0)[None, :] & (num_moved > 0)[:, None]
        total += (changed_NN / num_moved.clamp_min(1)[:, None] * counts).sum(1)
        count += counts.sum(1)
        changed_NN.fill_diagonal_(0.0)
        own = max(own, float((changed_NN * pairs_NN).abs().max()))
        others = max(others, float((changed_NN * (1 - pairs_NN)).abs().max()))
    return torch.where(count > 0, total / count.clamp_min(1), 0.0), own, others


def _fit_softmax(feed: Feed, found: Pairs, curve_N: torch.Tensor) -> None:
    """Scale and weights from the derivatives, then the misfit of that softmax at random embeddings. Fills `found`."""
    import torch

    pull_NN = found.pull_NN
    sizes_N = (pull_NN != 0).sum(1).double()
    positive = (pull_NN < 0).double()
    num_positives_N = positive.sum(1)
    strength_N = -curve_N * sizes_N**2  # w s^2
    pulled = -float((pull_NN * positive).triu(1).sum())
    scale = float((strength_N * (1 - num_positives_N / sizes_N.clamp_min(1))).sum()) / pulled
    found.scale, found.weight_N = scale, strength_N / scale**2
    other = positive[found.anchor_N]
    found.is_symmetric = bool(found.anchor_N[other.sum(0) > 0].any())
    codes = _random(pull_NN.shape[0], feed.codes_NE.shape[1], 5)
    measured = feed.joined(feed.gradient(codes)[0])
    leaf = codes.clone().requires_grad_(True)
    similarity = _similarity(leaf, found.is_cosine) * scale
    logits = similarity.masked_fill(pull_NN == 0, -1e30)
    each = logits.logsumexp(1) - (similarity * positive).sum(1) / num_positives_N.clamp_min(1)
    (expected,) = torch.autograd.grad((each * found.weight_N * found.anchor_N).sum(), leaf)
    stopped = measured.abs().sum(1) == 0  # the gradient to one side is stopped
    rest = (measured - expected)[~stopped].norm()
    found.residual = float(rest / measured.norm().clamp_min(1e-300))
    found.form = ContrastiveForm.SOFTMAX if found.residual <= MAX_RESIDUAL else ContrastiveForm.COUPLED
    if found.form is ContrastiveForm.COUPLED:
        found.weight_N = torch.full_like(found.weight_N, torch.nan)


def _similarity(codes_NE: torch.Tensor, is_cosine: bool) -> torch.Tensor:
    import torch

    unit = torch.nn.functional.normalize(codes_NE, dim=-1) if is_cosine else codes_NE
    return unit @ unit.T
