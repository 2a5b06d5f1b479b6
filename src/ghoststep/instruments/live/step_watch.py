"""Watches gradients on their way into the optimizer, while real steps are taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ghoststep.evidence.training import StepFacts
from ghoststep.instruments.live.optimizers import Held, number, watch_steps
from ghoststep.instruments.live.table_signal import zero_gradient_rows

if TYPE_CHECKING:
    import torch


@dataclass
class TensorTrace:
    """What one tensor of the optimizer saw. Norms are float64; `zero_R` is True for rows whose gradient was 0 in every step."""

    norms: list[float] = field(default_factory=list)
    backward: float = 0.0
    arrived: bool = False
    stepped: bool = False
    leftover: float = 0.0
    num_pushed: int = 0
    pushed: torch.Tensor | None = None
    zero_R: torch.Tensor | None = None


class StepWatch:
    """Hooks on every trainable tensor of the optimizer and on `step()`. `remove()` takes all of them off."""

    def __init__(self, all_held: Held, tensors: Sequence[tuple[int, torch.Tensor]], tables: frozenset[int]) -> None:
        self.traces = {id(t): TensorTrace() for _, t in tensors}
        self.steps: list[StepFacts] = []
        self.calls_since_step = 0
        self.backward_ran = False
        self._held, self._tensors, self._tables = all_held, tensors, tables
        self._undo: list[Callable[[], None]] = [watch_steps(all_held, self._after_step)]
        for _, t in tensors:
            if t.requires_grad:
                self._undo.append(t.register_hook(self._arrives(t)).remove)  # type: ignore[no-untyped-call]

    def _arrives(self, t: torch.Tensor) -> Callable[[torch.Tensor], None]:
        trace = self.traces[id(t)]

        def hook(gradient: torch.Tensor) -> None:
            self.backward_ran = True
            if not trace.arrived:
                trace.arrived = True
                if trace.stepped and t.grad is not None:  # a step of its optimizer lies between: this should have been cleared
                    trace.leftover = max(trace.leftover, norm_of(t.grad))
            trace.backward = max(trace.backward, norm_of(gradient))

        return hook

    def _after_step(self, optimizer: Any) -> None:
        mine = {id(t) for group in optimizer.param_groups for t in group["params"]}
        for key in mine & set(self.traces):
            self.traces[key].stepped = True
        if not self.backward_ran:
            return  # the second of two optimizers that step together
        backward, seen = [], []
        for _, t in self._tensors:
            trace = self.traces[id(t)]
            norm = 0.0 if t.grad is None else norm_of(t.grad)
            trace.norms.append(norm)
            seen.append(norm)
            backward.append(trace.backward)
            self._keep(t, trace, norm)
            trace.backward, trace.arrived = 0.0, False
        lrs = tuple(number(g.get("lr")) for g in self._held.groups)
        self.steps.append(
            StepFacts(
                lrs=lrs, gradient_norm=together(seen), backward_norm=together(backward), num_micro_batches=self.calls_since_step
            )
        )
        self.calls_since_step, self.backward_ran = 0, False

    def _keep(self, t: torch.Tensor, trace: TensorTrace, norm: float) -> None:
        if t.grad is not None and norm > 0 and math.isfinite(norm) and not t.grad.is_sparse:
            trace.pushed = t.grad.detach() != 0
            trace.num_pushed = int(trace.pushed.sum())
        if id(t) in self._tables and t.dim() == 2:
            import torch

            zero_R = torch.ones(t.shape[0], dtype=torch.bool) if t.grad is None else zero_gradient_rows(t.grad)
            trace.zero_R = zero_R if trace.zero_R is None else trace.zero_R & zero_R

    def remove(self) -> None:
        """Take all hooks off."""
        for undo in self._undo:
            undo()


def norm_of(gradient: torch.Tensor) -> float:
    """float64 L2 norm; inf or NaN where the gradient is not finite."""
    import torch

    values: Any = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = getattr(values, "to_local", lambda: values)()
    return float(torch.linalg.vector_norm(values.detach(), dtype=torch.float64)) if values.numel() else 0.0


def together(norms: Sequence[float]) -> float:
    """The norm of all tensors from the norm of each."""
    return math.hypot(*norms) if norms else 0.0
