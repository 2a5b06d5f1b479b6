"""`GateFloor`: a small constant added to the gates of recurrent mixers, so that a near-zero input row does not vanish twice."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, UsageError
from ghoststep.remedies.gate_floor_hooks import floored, install, strip
from ghoststep.remedies.gate_floor_probe import ROW_NORM, Reading, amplified, find_in, open_probe

if TYPE_CHECKING:
    import torch

    from ghoststep.remedies.gate_floor_find import Site

RISKY_GRADIENT = 1e3
"""Gradient of one row from which its step is lost to a clip at 1."""

RISKY_FACTOR = 10.0
"""How many times larger than without the floor it must be before the floor is to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A floored gate. module: name of the smallest module around it; kind: "silu" or "sigmoid"; order: which activation of
    that module's forward it is, from 0."""

    module: str
    kind: str
    order: int


class GateFloor:
    """Add `delta` to the output of every mixer gate of a model: `silu(z) + delta`, `sigmoid(z) + delta`.

    For training from scratch. In Mamba-like layers a near-zero input makes the gate vanish together with what it multiplies, and
    the gradient of that row is amplified without bound; with the floor it stays around 10/delta.

        with ghoststep.GateFloor(model, delta=1e-2): train(model)

    The model then computes another function: keep the floor wherever it runs, also for evaluation and generation. It is not
    part of the `state_dict`: install it again after `from_pretrained`. `copy.deepcopy` and `pickle` carry it along
    (`GateFloor.of(copy)` takes hold of it). Install before `torch.compile`, DDP and FSDP.

    Gates are found by running the model and changing things, not by name: an activation in a module that mixes positions,
    which depends on its own position, acts on its own position and multiplies what was mixed. Softmax attention and feed-forward
    layers are left alone. Then the gradient of one row of norm 1e-30 is measured at the first and a middle position, before
    and after: with zero convolution biases the floor itself can create the failure at the first position.

    Args:
        model: in the mode and dtype that it trains in. delta: above 0; 1e-2 is a good start.
        on_risk: "refuse" removes the floor and raises where it would create the failure; "warn" warns and keeps it.
        batch, loss_fn: as in `ghoststep.check`, for models that are not called with `input_ids` and `labels`.

    Attributes:
        gates: what was floored. readings: the gradients before and after, one a position.

    Cost: four forwards of the model, three of each mixer and four backwards, on two sequences of 16 tokens; for the
    training step see `docs/gate-floor.md`. The model is otherwise left as it was, bit for bit.

    Raises:
        UsageError: no gate is found (fused kernels hide them), a floor is there already, the model is compiled, delta is not a
            positive number, the model cannot be run, or the floor would create the failure.
    """

    def __init__(
        self, model: torch.nn.Module, delta: float = 1e-2, *, on_risk: str = "refuse", batch: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
    ) -> None:  # fmt: skip
        _need_arguments(model, delta, on_risk)
        probe = open_probe(model, batch, loss_fn)
        self.model, self.delta = probe.core, float(delta)
        _need_bare(self.model)
        sites = find_in(probe)
        if not sites:
            raise UsageError(_NONE_FOUND)
        self.gates: tuple[Gate, ...] = _named(self.model, sites)
        self.readings: tuple[Reading, ...] = ()
        reason = ""
        try:
            before = amplified(probe)
            self._install(sites)
            after = amplified(probe)
            self.readings = tuple(Reading(place=p, before=before[p], after=after[p]) for p in before)
        except CannotLook as error:
            reason = f"what the floor does to a near-zero row cannot be measured: {error}"
            self._install(sites)
        except BaseException:
            self.remove()
            raise
        self._judge(reason, on_risk)

    @classmethod
    def of(cls, model: torch.nn.Module) -> GateFloor:
        """The floor that a model carries, as after `copy.deepcopy` or `pickle`. `UsageError` if there is none."""
        found = list(floored(model))
        if not found:
            raise UsageError("the model has no gate floor")
        floor = cls.__new__(cls)
        floor.model, floor.delta, floor.readings = model, found[0][2].delta, ()
        floor.gates = tuple(Gate(module=name, kind=hook.kind, order=hook.order) for name, _, hook in found)
        return floor

    def remove(self) -> None:
        """Take the floor off; the model then computes the same bits as before. Does nothing if it is off."""
        for module in self.model.modules():
            strip(module)

    def __enter__(self) -> GateFloor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"GateFloor(delta={self.delta:g}, gates={len(self.gates)})"

    def _install(self, sites: list[Site]) -> None:
        if not any(True for _ in floored(self.model)):
            for site in sites:
                install(site.module, self.delta, site.kind, site.order, site.total)

    def _judge(self, reason: str, on_risk: str) -> None:
        risky = [r for r in self.readings if r.after > RISKY_GRADIENT and r.after > RISKY_FACTOR * r.before]
        risky += [r for r in self.readings if not math.isfinite(r.after) and math.isfinite(r.before) and r not in risky]
        if risky:
            worst = max(risky, key=lambda r: (not math.isfinite(r.after), r.after))
            reason = (
                f"with a floor of {self.delta:g} the gradient of one row of norm {ROW_NORM:g} at the {worst.place} of a sequence rises "
                f"from {worst.before:.1e} to {worst.after:.1e} (from 1e3 on, a clip to 1 leaves only that row of the step): there "
                "the floor creates the failure that it prevents elsewhere"
            )
        useless = [r for r in self.readings if r.before > RISKY_GRADIENT and not r.after < r.before / 2]
        if useless and not reason:
            warnings.warn(_no_help(useless[-1], self.gates), UserWarning, stacklevel=3)
        if not reason:
            return
        cure = (
            "Initialise the convolutions' biases away from zero (0.1 x N(0, 1) will do), or let every sequence and every packed "
            "document begin with a BOS token, so that no rare token stands there, and pass on_risk='warn'; a smaller delta may do too"
            if risky else "Give batch= and loss_fn= as for ghoststep.check, or pass on_risk='warn' to keep the floor unmeasured"
        )  # fmt: skip
        if on_risk == "refuse":
            self.remove()
            raise UsageError(f"{reason}. The floor is removed again. {cure}")
        warnings.warn(f"{reason}. The floor stays. {cure}", UserWarning, stacklevel=3)


def _no_help(reading: Reading, gates: tuple[Gate, ...]) -> str:
    sigmoid = all(g.kind == "sigmoid" for g in gates)
    why = "sigmoid gates are 0.5 at zero and do not vanish" if sigmoid else "it takes another path, or delta is too small"
    return (
        f"the floor does not help at the {reading.place} of a sequence: the gradient of one row of norm {ROW_NORM:g} was "
        f"{reading.before:.1e} and is {reading.after:.1e} ({why}). ghoststep.clip_grad_norm_ keeps the steps"
    )


_NONE_FOUND = (
    "no gate of a recurrent mixer was found: no SiLU or sigmoid that acts on its own position and multiplies what a module has mixed "
    "from several. Attention and feed-forward layers have none. A fused kernel (mamba_ssm, fla) computes its gate where nothing can be "
    "added: run the model on torch's own operations instead. The floor is not installed"
)


def _need_arguments(model: Any, delta: Any, on_risk: Any) -> None:
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < math.inf:
        raise UsageError(f"delta is {delta!r}; expected a number above 0, such as 1e-2")
    if on_risk not in ("refuse", "warn"):
        raise UsageError(f"on_risk is {on_risk!r}; expected 'refuse' or 'warn'")
    if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules()):
        raise UsageError("the model is compiled already, and compiled code ignores a floor; install it before torch.compile")


def _need_bare(core: torch.nn.Module) -> None:
    found = next(iter(floored(core)), None)
    if found is not None:
        raise UsageError(
            f"a gate floor of {found[2].delta:g} is installed already (on {found[0]}); remove it first, "
            "or take hold of it with GateFloor.of(model)"
        )


def _named(core: torch.nn.Module, sites: list[Site]) -> tuple[Gate, ...]:
    names = {id(module): name for name, module in core.named_modules()}
    return tuple(Gate(module=names[id(s.module)], kind=s.kind, order=s.order) for s in sites)
