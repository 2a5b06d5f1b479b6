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


_SMALLEST, _LARGEST = 1e-12, 1e15
"""Norms between which float32 loses nothing: the squares of what counts lie far inside its range."""
_BLOCK = 4096


@dataclass
class TensorTrace:
    """What one tensor of the optimizer saw. Norms are L2 (`norm_of`); `zero_R` is True for rows whose gradient was 0 in every step."""

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
        self.backward_ran = self.draws_random = False
        self._random: tuple[torch.Tensor, torch.device] | None = None
        self._held, self._tensors, self._tables = all_held, tensors, tables
        self._undo: list[Callable[[], None]] = [watch_steps(all_held, self._after_step)]
        for _, t in tensors:
            if t.requires_grad:
                self._undo.append(t.register_hook(self._arrives(t)).remove)  # type: ignore[no-untyped-call]

    def _arrives(self, t: torch.Tensor) -> Callable[[torch.Tensor], None]:
        trace = self.traces[id(t)]

        def hook(gradient: torch.Tensor) -> None:
            self.backward_ran = True
            self._random = _randomness(t.device), t.device
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
        if self._random is not None:  # between the last gradient and the end of the step: stochastic rounding
            self.draws_random |= not bool((_randomness(self._random[1]) == self._random[0]).all())
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
            trace.num_pushed = int(trace.pushed.count_nonzero())
        if id(t) in self._tables and t.dim() == 2:
            import torch

            zero_R = torch.ones(t.shape[0], dtype=torch.bool) if t.grad is None else zero_gradient_rows(t.grad)
            trace.zero_R = zero_R if trace.zero_R is None else trace.zero_R & zero_R

    def remove(self) -> None:
        """Take all hooks off."""
        for undo in self._undo:
            undo()


def _randomness(device: torch.device) -> torch.Tensor:
    import torch

    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def norm_of(gradient: torch.Tensor) -> float:
    """L2 norm to about 1e-6, whatever its size; inf or NaN where the gradient is not finite. A shard's own part of a sharded one.

    Cost: one pass in float32, of which blocks are joined in float64 (all of it in float64 takes 20 times as long); a second one in
    float64 where float32 would lose or overflow squares."""
    values: Any = gradient.coalesce().values() if gradient.is_sparse else gradient
    return norm_of_values(getattr(values, "to_local", lambda: values)())


def norm_of_values(values: torch.Tensor) -> float:
    """The same for a dense tensor that is here as a whole."""
    import torch

    values = values.detach()
    if not values.numel():
        return 0.0
    if values.dtype != torch.float64:
        flat = values.reshape(-1)
        whole = flat.numel() // _BLOCK * _BLOCK
        blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=-1, dtype=torch.float32)
        rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
        quick = float(torch.linalg.vector_norm(torch.cat([blocks, rest[None]]), dtype=torch.float64))
        if _SMALLEST < quick < _LARGEST:
            return quick
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def together(norms: Sequence[float]) -> float:
    """The norm of all tensors from the norm of each."""
    return math.hypot(*norms) if norms else 0.0
