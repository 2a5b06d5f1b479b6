"""Parameters against optimizer and gradients: who is trained, by one real backward of the user's loss on the first batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, SetupCannotRun
from ghoststep.evidence.base import Missing
from ghoststep.evidence.training import Gradient, LiveWiring, Orphan, ParameterFacts
from ghoststep.instruments.live.calling import LiveCall, compute_loss, eager, unwrap
from ghoststep.instruments.live.gradient_cut import CutFacts, ModuleUses, find_cuts
from ghoststep.instruments.live.optimizers import Held, group_facts, held, holds_copies
from ghoststep.instruments.live.step_watch import norm_of_values
from ghoststep.instruments.live.table_signal import SignalWatch, head_of, padding_row, table_signals
from ghoststep.instruments.live.untouched import untouched
from ghoststep.instruments.live.users_errors import as_it_is
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch


@instrument
def live_wiring(setup: Setup, call: LiveCall | Missing) -> LiveWiring:
    """One forward and backward of the user's loss; parameters are looked up in the optimizer by identity.

    Without a batch or a loss the optimizer is still compared with the model. Nothing is changed; see `untouched`. Gradients of
    the backward live only while it is read: memory as in a training step without optimizer state. Further forwards: one for each
    group of parameters that got no gradient (at most 8).
    """
    core, _ = unwrap(setup.model)
    named = list(core.named_parameters())
    aliases: dict[int, list[str]] = {}
    for name, p in core.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(p), []).append(name)
    all_held = held(setup.optimizer)
    found = _Backward(setup, call, named, all_held)
    groups = {id(p): index for index, p in all_held.tensors()}
    return LiveWiring(
        parameters=tuple(
            ParameterFacts(
                name=name, aliases=tuple(a for a in aliases.get(id(p), []) if a != name), shape=tuple(p.shape),
                dtype=str(p.dtype).removeprefix("torch."), num_elements=p.numel(), trainable=p.requires_grad,
                group=groups.get(id(p)), gradient=found.gradients.get(name, (None, 0.0))[0],
                gradient_norm=found.gradients.get(name, (None, 0.0))[1],
            )
            for name, p in named
        ),
        groups=group_facts(all_held),
        orphans=found.orphans,
        has_optimizer=bool(all_held.optimizers),
        holds_copies=holds_copies(all_held, [p for _, p in named if p.requires_grad]),
        gradient_reason=found.reason,
        loss=found.loss,
        grad_mode_before=found.mode_before,
        grad_mode_after=found.mode_after,
        cut=found.cuts.cut,
        unused=found.cuts.unused,
        undecided=found.cuts.undecided,
        tables=found.tables,
        padding_row=found.padding,
        head=_name_of(None if isinstance(call, Missing) else head_of(call), named),
        embedding=_name_of(None if isinstance(call, Missing) else call.embedding, named),
    )  # fmt: skip


def _name_of(module: torch.nn.Module | None, named: list[tuple[str, torch.nn.Parameter]]) -> str:
    weight = getattr(module, "weight", None)
    return next((name for name, p in named if weight is not None and p is weight), "")


class _Backward:
    """Runs the backward and keeps what it showed. Attributes hold plain values only once it has run."""

    def __init__(
        self, setup: Setup, call: LiveCall | Missing, named: list[tuple[str, torch.nn.Parameter]], all_held: Held
    ) -> None:
        import torch

        self.gradients: dict[str, tuple[Gradient, float]] = {
            name: (Gradient.FROZEN, 0.0) for name, p in named if not p.requires_grad
        }
        self.mode_before = self.mode_after = torch.is_grad_enabled()
        self.loss, self.reason = math.nan, ""
        self.cuts = CutFacts()
        self.tables: tuple[Any, ...] = ()
        self.padding: Any = None
        mine = {id(p) for _, p in named}
        self._outside = [(i, t) for i, t in all_held.tensors() if id(t) not in mine]
        self._reached: set[int] = set()
        if not setup.batches:
            self.reason = "the setup has no batch"
        elif not self.mode_before:
            self.reason = "gradient mode is off (torch.set_grad_enabled(False) or no_grad was left on)"
        elif isinstance(call, Missing) and call.cannot_run:
            self.reason = call.reason
        else:
            self._run(setup, call, named)
        self.orphans = tuple(
            Orphan(
                group=i, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."), gets_gradient=id(t) in self._reached
            )
            for i, t in self._outside
        )

    def _run(self, setup: Setup, call: LiveCall | Missing, named: list[tuple[str, torch.nn.Parameter]]) -> None:
        import torch

        kept = [t.grad for _, t in self._outside]
        uses, signal = ModuleUses(setup.model), SignalWatch(call)
        try:
            with untouched(setup), eager():
                for _, t in self._outside:
                    t.grad = None
                try:
                    with as_it_is(setup):
                        loss = compute_loss(setup, setup.batches[0])
                except SetupCannotRun:
                    raise
                except CannotLook as reason:
                    self.reason = str(reason)
                    return
                self.mode_after = torch.is_grad_enabled()
                self.loss = float(loss.detach())
                if not loss.requires_grad:
                    self.reason = "the loss does not require a gradient: backward() would raise"
                    return
                with as_it_is(setup, "backward() of your loss"):
                    loss.backward()  # type: ignore[no-untyped-call]
                for name, p in named:
                    if p.requires_grad:
                        self.gradients[name] = gradient_state(p.grad)
                self._reached = {id(t) for _, t in self._outside if t.grad is not None}
                self.tables = table_signals(call, named, signal)
                self.padding = padding_row(setup, call, signal)
        finally:
            uses.remove()
            signal.remove()
            for (_, t), gradient in zip(self._outside, kept, strict=True):
                t.grad = gradient
        missing = [(n, p) for n, p in named if self.gradients.get(n, (None,))[0] is Gradient.NONE]
        self.cuts = find_cuts(setup, missing, uses, self.loss)


def gradient_state(gradient: torch.Tensor | None) -> tuple[Gradient, float]:
    """What a gradient is, and its L2 norm (inf or NaN where it is not finite)."""
    if gradient is None:
        return Gradient.NONE, 0.0
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = getattr(values, "full_tensor", lambda: values)()
    norm = norm_of_values(values)
    if not math.isfinite(norm):
        return Gradient.NONFINITE, norm
    if norm == 0.0:
        return Gradient.ZERO, 0.0
    return Gradient.NORMAL, norm
