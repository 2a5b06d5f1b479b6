"""What a setup says about clipping, schedule, saving and training kind; and what saving and loading really keep."""

from __future__ import annotations

import math
import tempfile
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.training import ClipBound, SavedState, ScheduleFacts
from ghoststep.instruments.live.calling import unwrap
from ghoststep.instruments.live.optimizers import Held, held, number
from ghoststep.instruments.live.schedule_curve import step_ahead
from ghoststep.instruments.live.untouched import untouched
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup
from ghoststep.undisturbed import undisturbed

if TYPE_CHECKING:
    import torch

AHEAD = 64


@instrument
def clip_bound(setup: Setup) -> ClipBound:
    """`max_grad_norm` as given; `DoesNotApply` without one."""
    if setup.max_grad_norm is None:
        raise DoesNotApply("the setup has no max_grad_norm")
    return ClipBound(max_grad_norm=float(setup.max_grad_norm))


@instrument
def schedule_facts(setup: Setup) -> ScheduleFacts:
    """Step the scheduler 64 times without the optimizer, read the learning rates and put both back. No forward."""
    scheduler, all_held = setup.scheduler, held(setup.optimizer)
    if scheduler is None or not all_held.groups:
        raise DoesNotApply("the setup has no scheduler" if scheduler is None else "the setup has no optimizer")
    ahead = step_ahead(scheduler, all_held, AHEAD, lambda: _largest_rate(all_held))
    return ScheduleFacts(
        lrs_ahead=tuple(ahead),
        is_adaptive=any("betas" in g and "eps" in g for g in all_held.groups),
        has_state=any(bool(getattr(o, "state", None)) for o in all_held.optimizers),
    )


def _largest_rate(all_held: Held) -> float:
    rates = [r for r in (number(g.get("lr")) for g in all_held.groups) if not math.isnan(r)]
    return max(rates, default=math.nan)


@instrument
def saved_state(setup: Setup) -> SavedState:
    """Move every trainable parameter, run the setup's `save` and `load` in a temporary folder, compare by name, put back.

    `DoesNotApply` without both functions; `CannotLook` when they raise or give no module. Cost: one save and one load.
    """
    import torch

    if setup.save is None or setup.load is None:
        raise DoesNotApply("the setup has no save and load")
    core, _ = unwrap(setup.model)
    trainable = {name: p for name, p in core.named_parameters() if p.requires_grad}
    kept = {name: p.detach().clone() for name, p in trainable.items()}
    generator = torch.Generator().manual_seed(20)
    try:
        with untouched(setup), tempfile.TemporaryDirectory(prefix="ghoststep_") as folder:
            with torch.no_grad():
                for p in trainable.values():
                    p.add_(
                        torch.randn(p.shape, generator=generator).to(p)
                        * (0.05 + 0.5 * p.float().std(correction=0).nan_to_num())
                    )
            try:
                setup.save(setup.model, folder)
                loaded = setup.load(folder)
            except Exception as error:
                raise CannotLook(f"save or load raised {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
            return _compare(trainable, kept, loaded)
    finally:
        with undisturbed(), torch.no_grad():
            for name, p in trainable.items():
                p.copy_(kept[name])


def _compare(moved: dict[str, torch.nn.Parameter], before: dict[str, torch.Tensor], loaded: Any) -> SavedState:
    import torch

    if not isinstance(loaded, torch.nn.Module):
        raise CannotLook(f"load returned a {type(loaded).__name__}; expected the model")
    inner, _ = unwrap(loaded)
    there = dict(inner.named_parameters(remove_duplicate=False))
    missing, different = [], []
    for name, p in moved.items():
        other = there.get(name)
        if other is None or other.shape != p.shape:
            missing.append(name)
            continue
        move = float((p.detach().float() - before[name].float()).norm())
        left = float((p.detach().float() - other.detach().to(p.device).float()).norm())
        if move > 0 and not left <= 0.1 * move:
            different.append((name, left / move))
    return SavedState(num_compared=len(moved), missing=tuple(missing), different=tuple(different))
