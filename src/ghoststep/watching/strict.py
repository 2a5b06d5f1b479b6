"""Strict mode: whether a step would be lost is known before it is taken, at the price of one read by the host a step.

P parameters. A norm is the L2 norm of one gradient in float32, inf where its squares overflow, NaN if an element is, -1 for none.
"""

from __future__ import annotations

import functools
import logging
import math
import types
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ghoststep.errors import UsageError
from ghoststep.evidence.steps import HISTORY
from ghoststep.lost_step import CRUSHED_TRUNK, LEAST_HISTORY, LOST_COEFFICIENT, OWNED, UNSEEN_TRUNK

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

logger = logging.getLogger("ghoststep.watch")

KNOWN_BEFORE = {
    "GS401": "zeroed-step",
    "GS402": "crushed-step",
    "GS403": "nan-by-infinite-clip",
    "GS405": "nonfinite-gradient",
}
"""The lost steps that show in the gradients before the optimizer uses them."""


@dataclass(slots=True, kw_only=True)
class Decider:
    """Decides about one step after the other. tables: indices of the embedding tables among the P parameters.

    Remembers the trunk's norm after clipping of the last `HISTORY` steps that were taken.
    """

    tables: Sequence[int] = ()
    _trunks: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def decide(
        self, before: torch.Tensor | None, after: torch.Tensor | None, any_nonfinite: Callable[[], bool] = lambda: False
    ) -> str | None:
        """The code of the way in which this step would be lost, or None.

        before, after: norms [P] on one device, before and after clipping; None if nothing has a gradient. any_nonfinite: whether a
        gradient holds inf or NaN now; asked (it may wait for the device) only where a norm of inf leaves that open. Cost: one copy
        of 2 P floats to the host.
        """
        if before is None or after is None:
            return None
        before_P, after_P = _on_host(before, after)
        code = self._judge(before_P, after_P, any_nonfinite)
        if code is None:
            trunk = _norm(_without(after_P, self.tables))
            if math.isfinite(trunk):
                self._trunks.append(trunk)
        return code

    def _judge(
        self, before_P: NDArray[np.float64], after_P: NDArray[np.float64], any_nonfinite: Callable[[], bool]
    ) -> str | None:
        import numpy as np

        has_P = (before_P != -1.0) & (after_P != -1.0)  # NaN is unequal to everything: it counts as there
        then, now = before_P[has_P], after_P[has_P]
        if not len(then):
            return None
        if np.isnan(then).any():
            return "GS405"
        if np.isnan(now).any():
            # inf / inf makes every gradient NaN; bound / inf = 0 makes NaN only of gradients that held inf themselves
            return "GS403" if np.isnan(now[np.isfinite(then)]).any() else "GS405"
        if (now == 0).all():
            return "GS401" if (then > 0).any() else None
        if np.isinf(now).any():
            return "GS405" if any_nonfinite() else None
        return "GS402" if self._is_crushed(before_P, after_P, int(has_P.sum())) else None

    def _is_crushed(self, before_P: NDArray[np.float64], after_P: NDArray[np.float64], num_gradients: int) -> bool:
        whole, left = _norm(before_P), _norm(after_P)
        if num_gradients < 2 or not self.tables or not math.isfinite(whole) or not left < LOST_COEFFICIENT * whole:
            return False
        largest = max(float(before_P[i]) for i in self.tables)
        trunk, trunk_left = _norm(_without(before_P, self.tables)), _norm(_without(after_P, self.tables))
        if largest * largest < OWNED * whole * whole or trunk == 0.0:
            return False
        if len(self._trunks) < LEAST_HISTORY:
            return trunk < UNSEEN_TRUNK * whole
        return trunk_left < CRUSHED_TRUNK * sorted(self._trunks)[len(self._trunks) // 2]


def _on_host(before: torch.Tensor, after: torch.Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both, by one copy."""
    import torch

    both: NDArray[np.float64] = torch.stack([before, after]).to("cpu").double().numpy()
    return both[0], both[1]


def _without(norms_P: NDArray[np.float64], tables: Sequence[int]) -> NDArray[np.float64]:
    import numpy as np

    return np.delete(norms_P, list(tables)) if tables else norms_P


def _norm(norms: NDArray[np.float64]) -> float:
    """Of everything that has a gradient; float64 holds the square of every float32."""
    import numpy as np

    there = norms[norms != -1.0]
    return float(np.sqrt(np.square(there).sum()))


def decide(
    before: torch.Tensor | None,
    after: torch.Tensor | None,
    tables: Sequence[int],
    any_nonfinite: Callable[[], bool] = lambda: False,
) -> str | None:
    """`Decider.decide` for one step without a history."""
    return Decider(tables=tables).decide(before, after, any_nonfinite)


def cannot_skip(optimizer: Any, *, is_strict: bool) -> str:
    """Why a step of this optimizer cannot be skipped; "" if it can, as far as that shows before training."""
    import torch

    if not is_strict:
        return "it needs strict=True, which costs one read by the host a step"
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS runs backward inside its step, several times: there are no gradients to judge before it"
    if not callable(getattr(optimizer, "step", None)):
        return f"the optimizer is a {type(optimizer).__name__} without step()"
    return ""


class StrictStep:
    """Stands before `optimizer.step`: calls it unless `decide` says that the step would be lost in a way that is to be skipped.

    The wrapper is a bound method on the instance, so that the class stays what it is, a scheduler may wrap it in turn, and
    `GradScaler` still reads the signature. decide: the code, or None. on_skip(code): told instead of the step. A fault of ours in
    `decide` is handed to on_fault, and the step is taken. `missed` counts steps that went past the wrapper (another library put its
    own `step` on the optimizer): those were not judged.
    """

    def __init__(
        self,
        optimizer: Any,
        decide: Callable[[], str | None],
        *,
        skips: frozenset[str],
        on_skip: Callable[[str], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self.optimizer = optimizer
        self.missed = 0
        self._decide, self._skips, self._on_skip, self._on_fault = decide, skips, on_skip, on_fault
        self._is_on, self._is_inside, self._has_judged = True, False, False
        self._had_own = "step" in vars(optimizer)
        self._inner = optimizer.step
        self._set()
        has_hooks = hasattr(optimizer, "_optimizer_step_pre_hooks")  # not if its class never called that of torch's Optimizer
        register = getattr(optimizer, "register_step_pre_hook", None) if has_hooks else None
        self._handle = None if register is None else register(self._begins)

    def _set(self) -> None:
        inner = self._inner
        gate = self

        @functools.wraps(getattr(inner, "__func__", inner))
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not gate._is_on:
                return inner(*args, **kwargs)
            return gate._step(args, kwargs)

        self._outer = types.MethodType(step, self.optimizer)
        self.optimizer.step = self._outer

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            self._refuse_closure()
        else:
            code = self._judged()
            if code is not None:
                # `scheduler.step()` asks whether the optimizer was called before it: it was, and that is what we stand for.
                if hasattr(self._inner, "_wrapped_by_lr_sched"):
                    self.optimizer._opt_called = True
                self._tell(code)
                return None
        self._is_inside = True
        try:
            return self._inner(*args, **kwargs)
        finally:
            self._is_inside = False

    def _judged(self) -> str | None:
        self._has_judged = True
        try:
            code = self._decide()
        except Exception as error:
            self._on_fault(error)
            return None
        if code == "GS405" and getattr(self.optimizer, "found_inf", None) is not None:
            return None  # a fused optimizer under a GradScaler skips this step by itself
        return code if code in self._skips else None

    def _tell(self, code: str) -> None:
        try:
            self._on_skip(code)
        except Exception as error:
            self._on_fault(error)

    def _refuse_closure(self) -> None:
        """At the first step this is still a start; later it must not end a training."""
        if not self._has_judged and not self.missed:
            self.close()
            raise UsageError(
                "policy skip-step cannot work here: the optimizer's step got a closure, which runs backward inside the step, so that "
                'there are no gradients to judge before it; use "stop" or "raise"'
            )
        self.missed += 1

    def _begins(self, *_: Any) -> None:
        """A pre-hook, run by the class's own step: every step comes by here, whoever calls it."""
        if self._is_on and not self._is_inside:
            self.missed += 1

    def close(self) -> None:
        """Put `step` back as it was. If somebody wrapped ours meanwhile, theirs stays and ours only passes on."""
        self._is_on = False
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if vars(self.optimizer).get("step") is self._outer:
            if self._had_own:
                self.optimizer.step = self._inner
            else:
                del self.optimizer.step
