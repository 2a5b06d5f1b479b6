"""Decay of table rows without gradient: its rate measured on a small twin, its schedule read from the user's scheduler."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

from ghoststep.decay_law import exponents
from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.base import Missing
from ghoststep.evidence.decay import DecayFacts
from ghoststep.evidence.wiring import Tie, TieState
from ghoststep.instruments.live.calling import LiveCall, unwrap
from ghoststep.instruments.live.live_tables import input_weight
from ghoststep.instruments.live.optimizers import Held, held, number
from ghoststep.instruments.live.schedule_curve import schedule_curve
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup
from ghoststep.undisturbed import undisturbed

if TYPE_CHECKING:
    import torch

TWIN_STEPS = 40
"""Steps of the twin: momentum of 0.9 has settled to 1.5 % by then."""


@instrument
def decay_facts(setup: Setup, call: LiveCall | Missing, tie: TieState | Missing) -> DecayFacts:
    """What happens to a row of the input table whose gradient is always zero.

    `DoesNotApply` for a tied table (the softmax reaches every row in every step), a frozen one, one without decay or held by no
    optimizer; `CannotLook` where the optimizer cannot be run on a twin or its decay is not a factor. Cost: 40 optimizer
    steps on 64 numbers, and at most some thousand learning rates; no forward. Nothing is changed.
    """
    (name, table), _ = input_weight(setup, call)
    if isinstance(tie, TieState) and tie.tie in (Tie.TIED, Tie.DRIFTING, Tie.BROKEN_HEAD_MISSING):
        raise DoesNotApply("input table and head are tied: every row gets a gradient from the softmax in every step")
    if not table.requires_grad:
        raise DoesNotApply("the input table is frozen")
    all_held = held(setup.optimizer)
    if not all_held.groups:
        raise DoesNotApply("the setup has no optimizer")
    index, updated = _group_of(all_held, setup, name, table)
    declared = number(all_held.groups[index].get("weight_decay", 0.0))
    if not declared > 0:
        raise DoesNotApply(f"the input table's group {index} has no weight decay")
    curve = schedule_curve(setup, all_held, index)
    peak = max(curve.lrs)
    rate = 0.0 if not peak > 0 else _rate(all_held, index, updated.dtype, peak)
    return DecayFacts(
        parameter=name, group=index, declared_decay=declared, rate=rate, peak_lr=peak,
        dtype=str(updated.dtype).removeprefix("torch."), horizon=curve.horizon, schedule=curve.words, steps=curve.steps,
        exponents=tuple(exponents(curve.steps, curve.lrs, rate)),
    )  # fmt: skip


def _group_of(all_held: Held, setup: Setup, name: str, table: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The table's group, and the tensor that the optimizer updates for it: the parameter, or its master copy."""
    for index, tensor in all_held.tensors():
        if tensor is table:
            return index, tensor
    core, _ = unwrap(setup.model)
    mine = {id(p) for p in core.parameters()}
    copies = [(i, t) for i, t in all_held.tensors() if t.shape == table.shape and id(t) not in mine]
    if len({i for i, _ in copies}) == 1:  # the head's copy may have the same shape: the same group decays both alike
        return copies[0]
    raise DoesNotApply(f"the optimizer does not hold {name}")


def _rate(all_held: Held, index: int, dtype: torch.dtype, lr: float) -> float:
    """c in 1 - c · lr: what one settled step does to a tensor that always has a zero gradient."""
    import torch

    owner, group = all_held.owners[index], all_held.groups[index]
    generator = torch.Generator().manual_seed(7)
    start = torch.rand(8, 8, generator=generator) + 0.5  # far from 0, one binary order: rounding is the same for all
    ratios = []
    for size in (1.0, 2.0**-6):
        twin = torch.nn.Parameter((start * size).to(dtype))
        with undisturbed(), torch.enable_grad():
            norms = _run(owner, group, twin, lr)
        half = TWIN_STEPS // 2
        ratios.append((norms[-1] / norms[-1 - half]) ** (1 / half) if norms[-1 - half] > 0 else math.nan)
    if not all(0 <= r <= 1 for r in ratios) or abs(ratios[0] - ratios[1]) > 0.02 * max(1 - min(ratios), 1e-9):
        raise CannotLook(f"the decay of {type(owner).__name__} is no factor: steps multiply a row by {ratios[0]:g} or {ratios[1]:g}, "
                         "depending on its size")  # fmt: skip
    return (1 - ratios[0]) / lr


def _run(owner: Any, group: Any, twin: torch.nn.Parameter, lr: float) -> list[float]:
    settings = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "initial_lr", "param_names")}
    settings["lr"] = lr if isinstance(group.get("lr"), (int, float)) else group["lr"].new_tensor(lr).to("cpu")
    for key in ("capturable", "fused"):
        if key in settings:
            settings[key] = False if key == "capturable" else None
    try:
        try:
            optimizer = type(owner)(
                [{"params": [twin], **settings}], **{k: settings[k] for k in owner.defaults if k in settings}
            )
        except TypeError:
            optimizer = type(owner)([twin])
            optimizer.param_groups[0].update(settings)
        norms = []
        for _ in range(TWIN_STEPS):
            twin.grad = twin.detach().new_zeros(twin.shape)
            optimizer.step()
            norms.append(float(twin.detach().double().norm()))
    except Exception as error:
        raise CannotLook(f"{type(owner).__name__} cannot be run on a small tensor: {type(error).__name__}: {error}") from error
    return norms
