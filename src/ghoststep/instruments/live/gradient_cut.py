"""Why a trainable parameter got no gradient: the loss does not depend on it, or the graph is cut between the two.

A parameter whose gradient is None is perturbed: if the loss moves, it is used and the graph is cut; if not, nothing is lost
(experts without tokens, a pooler nobody reads). A parameter that only acts through a discrete choice (the indexer of a sparse
attention, a router's top-k) has no gradient by nature: the loss then moves by jumps, not in proportion.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.evidence.training import CutParameters
from ghoststep.instruments.live.calling import compute_loss, eager, unwrap
from ghoststep.instruments.live.influence_power import lifted, switched_off
from ghoststep.instruments.live.untouched import untouched
from ghoststep.instruments.live.users_errors import users_code
from ghoststep.subjects.setup import Setup
from ghoststep.undisturbed import undisturbed

if TYPE_CHECKING:
    import torch

MAX_GROUPS = 8
_SIZES = (0.03, 0.2, 1.0)
_SEEDS = (20, 21, 22)
_ROUNDING = 4e-6  # 32 float32 units: a smaller move of the loss may be rounding
_CHECKPOINT_FILE = "torch/utils/checkpoint.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutFacts:
    """Parameters without gradient, split by whether the loss depends on them."""

    cut: tuple[CutParameters, ...] = ()
    unused: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()


class ModuleUses:
    """Watches, during one forward, in which state each module ran and what it returned. `remove()` takes the hooks off."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.without_gradient: dict[str, bool] = {}
        self.discrete: set[str] = set()
        core, _ = unwrap(model)
        self._handles = [m.register_forward_hook(self._hook(name, m)) for name, m in core.named_modules() if name]

    def _hook(self, name: str, module: torch.nn.Module) -> Any:
        import torch

        has_own = any(True for _ in module.parameters(recurse=False))

        def hook(_module: Any, _args: Any, output: Any) -> None:
            if not isinstance(output, dict) and _is_discrete(output):
                self.discrete.add(name)
            if not has_own:
                return
            # Only a module that never ran with gradients on is cut off here; a recomputation runs with gradients on.
            if torch.is_grad_enabled():
                self.without_gradient.pop(name, None)
            elif name not in self.without_gradient:
                self.without_gradient[name] = _inside_reentrant_checkpoint()

        return hook

    def acts_discretely(self, parameter: str) -> bool:
        """True if a module around the parameter returns integers only: choices, through which no gradient can flow."""
        parts = parameter.split(".")
        return any(".".join(parts[:i]) in self.discrete for i in range(1, len(parts)))

    def reason(self, names: Sequence[str]) -> str:
        """The cause for these parameters, as far as their modules showed it."""
        states = [self.without_gradient.get(name.rpartition(".")[0]) for name in names]
        if any(states):
            return (
                "reentrant activation checkpointing: nothing that enters the checkpointed block requires a gradient, "
                "so its output is "
                "cut off from the graph"
            )
        if any(state is False for state in states):
            return "their modules run with gradients switched off (torch.no_grad or inference_mode)"
        return "their result is cut off from the graph on its way to the loss (detach, .data, .item, or a copy)"

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def _is_discrete(output: Any) -> bool:
    import torch

    items = [o for o in (output if isinstance(output, (tuple, list)) else (output,)) if isinstance(o, torch.Tensor)]
    return bool(items) and not any(o.is_floating_point() or o.is_complex() for o in items)


def _inside_reentrant_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        # `forward` of the autograd function is the reentrant kind; the other kind calls from `checkpoint` itself.
        if code.co_filename.replace("\\", "/").endswith(_CHECKPOINT_FILE) and code.co_name == "forward":
            return True
        frame = frame.f_back
    return False


def find_cuts(setup: Setup, missing: Sequence[tuple[str, torch.nn.Parameter]], uses: ModuleUses, loss: float) -> CutFacts:
    """Perturb the parameters, group by group, and see whether the loss moves. Values are put back bit for bit.

    What stands behind a zero initialisation (the other half of a low-rank adapter) moves nothing yet: meanwhile such parameters
    are given values.
    """
    if not missing:
        return CutFacts()
    mine = {id(p) for _, p in missing}
    off = [p for p in switched_off(setup.model, vectors=True) if id(p) not in mine]
    with lifted(off) if off else contextlib.nullcontext():
        return _find_cuts(setup, missing, uses, loss)


def _find_cuts(setup: Setup, missing: Sequence[tuple[str, torch.nn.Parameter]], uses: ModuleUses, loss: float) -> CutFacts:
    unused = [n for n, _ in missing if uses.acts_discretely(n)]
    missing = [(n, p) for n, p in missing if n not in unused]
    names = tuple(n for n, _ in missing)
    if not missing:
        return CutFacts(unused=tuple(unused))
    if not math.isfinite(loss):
        return CutFacts(unused=tuple(unused), undecided=names)
    groups: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, p in missing:
        groups.setdefault(_stem(name), []).append((name, p))
    if len(groups) > MAX_GROUPS:
        groups = {"": list(missing)}
    cut: list[CutParameters] = []
    undecided: list[str] = []
    try:
        base = _loss_with(setup, ())
    except (CannotLook, RuntimeError):
        return CutFacts(unused=tuple(unused), undecided=names)
    for members in groups.values():
        mine = tuple(n for n, _ in members)
        try:
            change = _loss_with(setup, [p for _, p in members]) - base
        except (CannotLook, RuntimeError):  # the perturbed values were too much for the user's code
            undecided += mine
            continue
        reason = uses.reason(mine)
        if change == 0.0:
            unused += mine
        elif not reason.startswith("reentrant") and not _is_smooth(setup, [p for _, p in members], base):
            undecided += mine
        else:
            cut.append(CutParameters(names=mine, loss_change=abs(change), reason=reason))
    return CutFacts(cut=tuple(cut), unused=tuple(unused), undecided=tuple(undecided))


def _stem(name: str) -> str:
    """The name up to its first number, or its first part: one group a stack of layers."""
    parts = name.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: max(1, numbered)] if numbered else parts[:-2] or parts[:1])


def _is_smooth(setup: Setup, perturbed: Sequence[torch.nn.Parameter], base: float) -> bool:
    """True if the loss follows the parameters in proportion: all together, or one of the last three matrices alone (further up,
    a perturbation may flip a router's choices on its way)."""
    last = [p for p in perturbed if p.dim() > 1][-3:]
    return any(_in_proportion(setup, some, base) for some in (perturbed, *([p] for p in reversed(last))))


def _in_proportion(setup: Setup, perturbed: Sequence[torch.nn.Parameter], base: float) -> bool:
    """True if half a perturbation moves the loss by half, over several directions.

    Only the odd part of the move is compared (plus against minus), so that curvature does not count. The smallest size whose
    move stands above rounding is taken: narrow types need larger ones. Cost: at most 14 forwards.
    """
    try:
        for size in _SIZES:
            first = _odd_part(setup, perturbed, size, _SEEDS[0])
            if abs(first) > _ROUNDING * abs(base):
                break
        else:
            return False
        whole = [first, *(_odd_part(setup, perturbed, size, seed) for seed in _SEEDS[1:])]
        half = [_odd_part(setup, perturbed, size / 2, seed) for seed in _SEEDS]
    except (CannotLook, RuntimeError):
        return False
    both = sum(w * h for w, h in zip(whole, half, strict=True))
    slope = both / sum(w * w for w in whole)
    spread = math.hypot(*whole) * math.hypot(*half)
    return 0.35 <= slope <= 0.65 and both >= 0.95 * spread


def _odd_part(setup: Setup, perturbed: Sequence[torch.nn.Parameter], size: float, seed: int) -> float:
    return _loss_with(setup, perturbed, scale=size, seed=seed) - _loss_with(setup, perturbed, scale=-size, seed=seed)


def _loss_with(setup: Setup, perturbed: Sequence[torch.nn.Parameter], *, scale: float = 1.0, seed: int = 20) -> float:
    import torch

    generator = torch.Generator().manual_seed(seed)
    kept = [p.detach().clone() for p in perturbed]
    try:
        with untouched(setup), eager(), users_code(), torch.no_grad():
            for p in perturbed:
                noise = torch.randn(p.shape, generator=generator).to(p)
                p.add_(noise * scale * (0.02 + 0.2 * p.abs().mean()))
            return float(compute_loss(setup, setup.batches[0]))
    finally:
        with undisturbed(), torch.no_grad():
            for p, value in zip(perturbed, kept, strict=True):
                p.copy_(value)
